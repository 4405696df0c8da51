"""Tasks of the reasoning-gym library, judged by the scorer of their own family.

`Question.answer` is the entry's answer (None where the family has none), `Question.prompt` its
question, and `Question.extra` holds `metadata`, as the library made it (its `source_dataset` names
the family), and, for a family that was generated with its own settings, `config`: the keyword
arguments of `create_dataset`.

What is handed to the scorer: the last `<answer>…</answer>` span; without one, the last line that
is not blank if the reference is a single line, else (a grid, or no reference) the whole
completion. Never more, since many scorers give credit for merely containing the answer, which
pays a model for listing guesses. What is left of that credit inside a span is withheld.

Reward is the scorer's value, partial credit of the family's own design included; outcome is 1
only for a full score, else 0.

Some scorers evaluate the answer as Python or through sympy, which evaluates too. An answer that
could call something, or read the scorer's variables, is not passed on: it scores 0. The child
process is a bound on time and memory, not a sandbox.
"""

import ast
import json
import re
from typing import Any

from verifiers.registry import verifier
from verifiers.spans import answer_span, last_line
from verifiers.verdict import Question, Verdict

_EVALUATE_PYTHON = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_EVALUATE_SYMPY = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
_FORMULA = re.compile(r"[A-Za-z0-9\s.+\-*/^()!,]*")
_CALL_OR_ATTRIBUTE = re.compile(r"([A-Za-z]\w*|\))\s*\(|\.\s*[A-Za-z]")
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
_FUNCTIONS = {"abs", "Abs", "sqrt", "cbrt", "exp", "log", "ln", "factorial"} | _TRIGONOMETRIC
_FUNCTIONS |= {f"a{name}" for name in _TRIGONOMETRIC}
_FULL_SCORE = 1.0 - 1e-9


@verifier("reasoning_gym")
class ReasoningGym:
    """The family scorer's value in [0, 1]; unscorable for an unknown family or missing metadata.

    A scorer that raises on an answer, but gives its own reference a full score, could not read
    the answer: that is a wrong answer. If it fails on the reference too, the error is the
    verifier's.
    """

    def __init__(self) -> None:
        from reasoning_gym.factory import DATASETS

        self._families = DATASETS
        self._scorers: dict[str, Any] = {}

    def __call__(self, question: Question, completion: str) -> Verdict:
        metadata = question.extra.get("metadata") or {}
        family = str(metadata.get("source_dataset"))
        if family not in self._families:
            return Verdict.unscorable(f"metadata names no reasoning-gym family: {family}")
        answer = answer_text(completion, question.answer)
        if not _harmless(family, answer) and answer != question.answer:
            return Verdict.ok(0.0, outcome=0.0, detail="not evaluated: more than a plain value")
        entry = {"question": question.prompt, "answer": question.answer, "metadata": metadata}
        score, detail = self._score(self._scorer(family, question), answer, entry)
        if _containment_credit(score, answer, question.answer):
            score, detail = 0.0, "contains the answer among other text"
        return Verdict.ok(score, outcome=float(score >= _FULL_SCORE), detail=detail)

    def _score(self, scorer: Any, answer: str, entry: dict[str, Any]) -> tuple[float, str]:
        try:
            return scorer(answer, entry), ""
        except MemoryError:
            raise
        except Exception as error:
            reference = entry["answer"]
            if reference is None or scorer(reference, entry) < _FULL_SCORE:
                raise
            return 0.0, f"unreadable answer ({type(error).__name__})"

    def _scorer(self, family: str, question: Question) -> Any:
        config = question.extra.get("config") or {}
        key = json.dumps([family, config], sort_keys=True, default=repr)
        if key not in self._scorers:
            dataset, settings = self._families[family]
            self._scorers[key] = dataset(config=settings(**config)).score_answer
        return self._scorers[key]


def answer_text(completion: str, reference: str | None) -> str:
    """The part of the completion that is handed to the scorer (see the module's text)."""
    span = answer_span(completion)
    if span is not None:
        return span
    single_line = reference is not None and "\n" not in reference.strip()
    return last_line(completion) if single_line else completion.strip()


def _harmless(family: str, answer: str) -> bool:
    if family in _EVALUATE_PYTHON:
        return _literal_or_no_expression(answer)
    if family in _EVALUATE_SYMPY:
        names = (match[1] for match in _CALL_OR_ATTRIBUTE.finditer(answer))
        return bool(_FORMULA.fullmatch(answer)) and all(name in _FUNCTIONS for name in names)
    return True


def _literal_or_no_expression(answer: str) -> bool:
    try:
        ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        return True
    except (ValueError, MemoryError, RecursionError):
        return False
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _containment_credit(score: float, answer: str, reference: str | None) -> bool:
    if not reference or reference not in answer or not 0 < score < _FULL_SCORE:
        return False
    return abs(score - len(reference) / len(answer)) < 1e-9
