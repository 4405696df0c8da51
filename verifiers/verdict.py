"""What goes into a verifier and what comes out: questions and typed verdicts.

Knows nothing of how verifiers are found or run. A verdict that is not ok carries no reward, so
that a failure to judge can never be read as a judgement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

from actors.trajectory import VerdictStatus

__all__ = ["Question", "Verdict", "VerdictStatus"]

DETAIL_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Question:
    """What a verifier knows besides the completion: the task as the data set states it.

    `answer` is the reference, None where the task has none; `extra` is whatever else the data
    set gives for this task, in the form that its verifier documents.
    """

    task_id: str
    prompt: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verifier's result for one completion. Build it with `ok` or `failed`.

    `reward` is finite where `status` is ok and None elsewhere. `outcome` is the plain result
    before any shaping (1.0 right, 0.0 wrong), None where there is no such thing. `detail` says
    in words what a number cannot. `seconds` is the wall time the verifier took.
    """

    reward: float | None
    outcome: float | None
    parts: Mapping[str, float]
    status: VerdictStatus
    detail: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError on a contradiction or what is not a finite number."""
        status = VerdictStatus(self.status)
        if (self.reward is not None) != (status is VerdictStatus.OK):
            raise ValueError(f"status {status} and reward {self.reward} contradict each other")
        if status is not VerdictStatus.OK and not self.detail:
            raise ValueError(f"a verdict with status {status} needs a detail that says why")
        printable = self.detail[:DETAIL_LIMIT].encode(errors="replace").decode()
        checked = {
            "reward": None if self.reward is None else finite("reward", self.reward),
            "outcome": None if self.outcome is None else finite("outcome", self.outcome),
            "parts": {str(name): finite(f"part {name}", part) for name, part in self.parts.items()},
            "status": status,
            "detail": printable,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def ok(
        cls,
        reward: float,
        *,
        outcome: float | None = None,
        parts: Mapping[str, float] | None = None,
        detail: str = "",
    ) -> Self:
        """A judgement."""
        return cls(reward, outcome, parts or {}, VerdictStatus.OK, detail)

    @classmethod
    def failed(cls, status: VerdictStatus, detail: str, seconds: float = 0.0) -> Self:
        """No judgement: `status` is unscorable, error or timeout, `detail` says why."""
        return cls(None, None, {}, status, detail, seconds)

    @classmethod
    def unscorable(cls, detail: str) -> Self:
        """The task itself cannot be judged: its reference is missing or unreadable."""
        return cls.failed(VerdictStatus.UNSCORABLE, detail)


def finite(what: str, value: object) -> float:
    """`value` as a float; TypeError if it is not a real number, ValueError if not finite."""
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number
