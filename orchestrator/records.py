"""The record of one step, and the JSON-lines file that keeps what a run measured.

Knows no library of metrics and no terminal: both read these records.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from orchestrator.bottleneck import Bottleneck, FlowGauges, Phase, find_bottleneck


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One batch step as the console, metrics.jsonl and Prometheus tell it."""

    step: int
    """Steps done, this one included."""
    steps: int
    """Steps that the run will do."""
    version: int
    """Learner's version after the step."""
    phase_seconds: Mapping[Phase, float]
    """Seconds of the training loop by `Phase`."""
    gauges: FlowGauges
    skipped: str = ""
    """Why the batch did not change the weights; empty if it did."""
    reward: float | None = None
    """Mean reward of the batch's scored samples."""
    accuracy: float | None = None
    """Mean outcome of the batch's scored samples, before shaping."""
    samples: int = 0
    unscored: int = 0
    """Of those samples, the ones without an ok verdict."""
    response_tokens: int = 0
    """Response tokens of the batch's samples."""
    staleness_tokens: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by how many versions they were behind."""
    masked_tokens: Mapping[str, int] = field(default_factory=dict)
    """Response tokens kept out of the loss, by reason."""
    learner: Mapping[str, float] = field(default_factory=dict)
    """What the learner measured, under its own names."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the step."""
        return sum(self.phase_seconds.values())

    @property
    def trained_tokens(self) -> int:
        """Response tokens that trained."""
        return sum(self.staleness_tokens.values())

    @property
    def staleness_mean(self) -> float | None:
        """Versions, over trained tokens; None without one."""
        if not self.trained_tokens:
            return None
        weighted = sum(lag * tokens for lag, tokens in self.staleness_tokens.items())
        return weighted / self.trained_tokens

    @property
    def staleness_max(self) -> int | None:
        """Versions, over trained tokens; None without one."""
        return max((lag for lag, tokens in self.staleness_tokens.items() if tokens), default=None)

    @property
    def response_tokens_mean(self) -> float | None:
        """Tokens per sample; None without a sample."""
        return self.response_tokens / self.samples if self.samples else None

    @property
    def trained_tokens_per_second(self) -> float:
        """Trained tokens over the step's wall-clock time."""
        return self.trained_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def bottleneck(self) -> Bottleneck:
        """The stage that held the step up."""
        return find_bottleneck(self.phase_seconds, self.gauges)

    def as_json(self) -> dict[str, object]:
        """One line of metrics.jsonl."""
        bottleneck = self.bottleneck
        return {
            "kind": "step",
            "step": self.step,
            "version": self.version,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "phase_seconds": {str(name): s for name, s in self.phase_seconds.items()},
            "reward": self.reward,
            "accuracy": self.accuracy,
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
            "staleness_tokens": {str(lag): n for lag, n in sorted(self.staleness_tokens.items())},
            "masked_tokens": dict(self.masked_tokens),
            "samples": self.samples,
            "unscored": self.unscored,
            "response_tokens_mean": self.response_tokens_mean,
            "trained_tokens": self.trained_tokens,
            "trained_tokens_per_second": self.trained_tokens_per_second,
            "queue_groups": self.gauges.queue_groups,
            "queue_bytes": self.gauges.queue_bytes,
            "generating_groups": self.gauges.generating_groups,
            "verifying_groups": self.gauges.verifying_groups,
            "bottleneck": bottleneck.stage.value,
            "bottleneck_evidence": bottleneck.evidence,
            "learner": dict(self.learner),
        }


class JsonLines:
    """Append-only file of JSON objects, one per line, each flushed as it is written."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record` with the time (`time`, unix seconds); what JSON cannot say is null."""
        line = {"time": time.time(), **record}
        self._file.write(json.dumps(finite_or_none(line), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    """Remove what a crash left after the last full line, so that a resumed run can append."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def finite_or_none(value: Any) -> Any:
    """`value` with numbers that JSON cannot say (NaN, infinities) replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(inner) for inner in value]
    return value
