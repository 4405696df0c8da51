"""Which stage held a step up, with the evidence. Pure: seconds and counts in, a name out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What the training loop's time is spent on; the phases of a step do not overlap."""

    WAIT_FOR_GROUPS = "wait_for_groups"
    SCORE = "score"
    TRAIN = "train"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    PAUSED = "paused"
    """Told to wait; counts neither as work nor as waiting for groups."""


class Stage(StrEnum):
    """What can hold a run up; also the values of the metric's label."""

    ROLLOUT = "rollout"
    VERIFIERS = "verifiers"
    LEARNER = "learner"
    WEIGHT_SYNC = "weight_sync"
    ADMISSION = "admission"

    @property
    def words(self) -> str:
        """The name as a reader of the console meets it."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGauges:
    """Where groups were during a step; means over the step, or values at its end."""

    queue_groups: float = 0
    """Ready groups that wait for the learner."""
    queue_capacity_groups: int = 0
    queue_bytes: float = 0
    """Bytes held by ready groups or reserved for groups in flight."""
    queue_capacity_bytes: int = 0
    generating_groups: float = 0
    """Groups in flight at rollout workers."""
    generation_slots: float = 0
    """Groups that the ready rollout workers could have in flight."""
    verifying_groups: float = 0
    """Groups generated and not yet scored."""
    admission_blocked_share: float = 0
    """Share of the step in which a slot was free and the staleness bound let no group start."""
    sync_paused_share: float = 0
    """Share of the step in which the average rollout worker stood still to load weights."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage to give more resources to, and why."""

    stage: Stage
    evidence: str

    def __str__(self) -> str:
        return f"{self.stage.words} ({self.evidence})"


def find_bottleneck(phase_seconds: Mapping[Phase, float], gauges: FlowGauges) -> Bottleneck:
    """Name what took the largest share of the training loop's time.

    Where the loop worked, that is the learner or the publication of weights. Where it waited for
    groups, the gauges tell what the groups were waiting for.
    """
    counted: dict[Phase, float] = dict(phase_seconds)
    counted.pop(Phase.PAUSED, None)
    total = sum(counted.values())
    if total <= 0:
        return Bottleneck(Stage.LEARNER, "no time measured")
    shares = {name: seconds / total for name, seconds in counted.items()}
    waited = shares.get(Phase.WAIT_FOR_GROUPS, 0.0)
    published = shares.get(Phase.PUBLISH, 0.0)
    busy = 1.0 - waited - published
    if published >= max(waited, busy):
        return Bottleneck(Stage.WEIGHT_SYNC, f"publishing took {percent(published)}")
    if busy >= waited:
        return Bottleneck(Stage.LEARNER, _busiest(shares, busy))
    return _awaited(waited, gauges)


def _busiest(shares: Mapping[Phase, float], busy: float) -> str:
    others = (Phase.WAIT_FOR_GROUPS, Phase.PUBLISH)
    own = {name: share for name, share in shares.items() if name not in others}
    name = max(own, key=lambda phase: own[phase])
    return f"busy {percent(busy)}, mostly {name}"


def _awaited(waited: float, gauges: FlowGauges) -> Bottleneck:
    evidence = f"learner waited {percent(waited)}"
    if gauges.sync_paused_share >= 0.5:
        paused = f"workers paused to load {percent(gauges.sync_paused_share)}"
        return Bottleneck(Stage.WEIGHT_SYNC, f"{evidence}, {paused}")
    if gauges.verifying_groups > gauges.generating_groups:
        counts = f"{gauges.verifying_groups:.0f} groups being scored, "
        counts += f"{gauges.generating_groups:.0f} generating"
        return Bottleneck(Stage.VERIFIERS, f"{evidence}, {counts}")
    if gauges.admission_blocked_share >= 0.5:
        refused = f"free slots refused {percent(gauges.admission_blocked_share)} of the time"
        return Bottleneck(Stage.ADMISSION, f"staleness bound; {evidence}, {refused}")
    return Bottleneck(Stage.ROLLOUT, evidence)


def percent(share: float) -> str:
    """A share as a whole percentage, `61 %`."""
    return f"{100 * share:.0f} %"
