"""Exact match with the reference."""

from verifiers.registry import verifier
from verifiers.spans import answer_span
from verifiers.verdict import Question, Verdict


@verifier("exact", isolated=False)
def exact(question: Question, completion: str) -> float | Verdict:
    """1 if the last `<answer>` span, or without one the whole completion, is the reference.

    White space at both ends is ignored and nothing else: case, inner spaces and punctuation
    count. Without a reference the task is unscorable.
    """
    if question.answer is None:
        return Verdict.unscorable("exact needs a reference answer")
    span = answer_span(completion)
    return float((completion if span is None else span).strip() == question.answer.strip())
