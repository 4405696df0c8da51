"""What a ledger counts: samples and tokens by fate and reason, and how long they were.

Pure arithmetic; which event counts as what is decided in `ledger`.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LENGTH_EDGES = (0, *(1 << power for power in range(20)))
"""Upper bounds of the length buckets in response tokens, inclusive; one more bucket is above."""


class Fate(StrEnum):
    """How a completed sample, or one of its tokens, ended."""

    TRAINED = "trained"
    """A sample: at least one of its tokens trained, in the surviving history."""
    MASKED = "masked"
    """Consumed by the learner, kept out of the loss."""
    DROPPED = "dropped"
    """Left without being consumed."""
    SUPERSEDED = "superseded"
    """Of an attempt that another attempt replaces."""


@dataclass(frozen=True)
class Totals:
    """A balance in one unit, samples or tokens."""

    generated: int
    trained: int
    pending: int
    """Of groups that have not left yet."""
    masked_by_reason: Mapping[str, int]
    dropped_by_reason: Mapping[str, int]
    superseded_by_reason: Mapping[str, int]

    @property
    def masked(self) -> int:
        """Over all reasons."""
        return sum(self.masked_by_reason.values())

    @property
    def dropped(self) -> int:
        """Over all reasons."""
        return sum(self.dropped_by_reason.values())

    @property
    def superseded(self) -> int:
        """Over all reasons."""
        return sum(self.superseded_by_reason.values())

    @property
    def balanced(self) -> bool:
        """generated = trained + masked + dropped + superseded + pending."""
        ended = self.trained + self.masked + self.dropped + self.superseded
        return self.generated == ended + self.pending

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "generated": self.generated,
            "trained": self.trained,
            "masked": self.masked,
            "dropped": self.dropped,
            "superseded": self.superseded,
            "pending": self.pending,
            "masked_by_reason": dict(self.masked_by_reason),
            "dropped_by_reason": dict(self.dropped_by_reason),
            "superseded_by_reason": dict(self.superseded_by_reason),
        }


@dataclass
class UnitCounts:
    """Running counts in one unit."""

    generated: int = 0
    ended: dict[Fate, dict[str, int]] = field(default_factory=lambda: {fate: {} for fate in Fate})
    """By fate, then by reason; trained has the one reason ""."""

    def end(self, fate: Fate, reason: str, count: int) -> None:
        """`count` samples or tokens met this fate."""
        if count:
            self.ended[fate][reason] = self.ended[fate].get(reason, 0) + count

    def totals(self, pending: int) -> Totals:
        """The balance, given what is still on its way."""
        return Totals(
            generated=self.generated,
            trained=sum(self.ended[Fate.TRAINED].values()),
            pending=pending,
            masked_by_reason=dict(self.ended[Fate.MASKED]),
            dropped_by_reason=dict(self.ended[Fate.DROPPED]),
            superseded_by_reason=dict(self.ended[Fate.SUPERSEDED]),
        )


@dataclass
class LengthHistogram:
    """Samples per bucket of response length."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_EDGES) + 1))
    """One per edge, and one for what is longer than the last."""

    def add(self, tokens: int) -> None:
        """Count a sample of so many response tokens."""
        self.counts[bisect.bisect_left(LENGTH_EDGES, tokens)] += 1

    def as_dict(self) -> dict[str, int]:
        """Non-empty buckets by their upper bound, `inf` for the last."""
        names = [str(edge) for edge in LENGTH_EDGES] + ["inf"]
        return {name: count for name, count in zip(names, self.counts, strict=True) if count}


@dataclass
class Counts:
    """Everything a ledger counts of completed samples."""

    samples: UnitCounts = field(default_factory=UnitCounts)
    tokens: UnitCounts = field(default_factory=UnitCounts)
    generated_lengths: LengthHistogram = field(default_factory=LengthHistogram)
    ended_lengths: dict[Fate, LengthHistogram] = field(
        default_factory=lambda: {fate: LengthHistogram() for fate in Fate}
    )

    def generated(self, tokens: int) -> None:
        """A sample of so many response tokens was completed."""
        self.samples.generated += 1
        self.tokens.generated += tokens
        self.generated_lengths.add(tokens)

    def left(self, fate: Fate, reason: str, tokens: int) -> None:
        """A whole sample, all of its tokens with it, met one fate."""
        self.samples.end(fate, reason, 1)
        self.tokens.end(fate, reason, tokens)
        self.ended_lengths[fate].add(tokens)

    def consumed(self, trained_tokens: int, masked: Mapping[str, int]) -> None:
        """A sample was consumed; tokens count by their own fate, the sample by its best token.

        A sample without a trained token counts under the reason that masked most of its tokens.
        """
        self.tokens.end(Fate.TRAINED, "", trained_tokens)
        for reason, count in masked.items():
            self.tokens.end(Fate.MASKED, reason, count)
        length = trained_tokens + sum(masked.values())
        if trained_tokens:
            fate, reason = Fate.TRAINED, ""
        else:
            fate = Fate.MASKED
            reason = max(sorted(masked), key=lambda name: masked[name], default="empty")
        self.samples.end(fate, reason, 1)
        self.ended_lengths[fate].add(length)
