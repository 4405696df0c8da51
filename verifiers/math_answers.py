r"""Mathematical equivalence, by the math-verify library.

Compared are the reference and the last `<answer>` span of the completion, or without one the
whole completion, in which math-verify looks for `\boxed{…}` first, then for other LaTeX and plain
expressions. References and spans may be bare (`\frac{1}{2}`) or carry delimiters (`$…$`). Sympy
may run for ever on a hostile expression, so this verifier has to run isolated: the library's own
time limits need signals of a main thread, and are off.
"""

import logging
from typing import Any

from verifiers.registry import verifier
from verifiers.spans import answer_span
from verifiers.verdict import Question, Verdict

_DELIMITERS = ("$", r"\(", r"\[", r"\boxed", r"\begin{")


@verifier("math")
class MathAnswers:
    """1 if the completion is equivalent to the reference, 0 if not or if it holds no expression.

    Unscorable where the reference is missing or holds no expression.
    """

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._equal(self._parse(r"$\frac{1}{2}$"), self._parse("0.5"))

    def __call__(self, question: Question, completion: str) -> float | Verdict:
        reference = self._parse(_delimited(question.answer or ""))
        if not reference:
            return Verdict.unscorable(f"math needs an expression, got {question.answer!r}")
        span = answer_span(completion)
        found = self._parse(completion if span is None else _delimited(span))
        return float(bool(found) and self._equal(reference, found))

    def _parse(self, text: str) -> list[Any]:
        return self._library.parse(text, parsing_timeout=None, raise_on_error=True)

    def _equal(self, reference: Any, found: Any) -> bool:
        return self._library.verify(reference, found, timeout_seconds=None, raise_on_error=True)


def _delimited(text: str) -> str:
    bare = text.strip() and not any(mark in text for mark in _DELIMITERS)
    return rf"\boxed{{{text}}}" if bare else text
