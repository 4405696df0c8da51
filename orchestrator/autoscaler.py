"""When to add a worker and when to give one up: a controller without clock, cluster or loop.

It moves one worker of one role at a time, only after several looks in a row agree, and leaves a
role alone for a while after each change. Two thresholds with a gap between them, a look ahead
before a worker is given up, and a memory of sizes that were too small keep it from flapping.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.operation_config import AutoscalerConfig, ScaleBounds
from orchestrator.steering import Role

SATURATED = 0.7
"""Share of its slots above which a fleet counts as busy: more workers would be used."""
SPARE = 0.9
"""What the remaining workers may be loaded to, for one of them to be given up."""
MEMORY_COOLDOWNS = 10.0
"""How long, in cooldowns, a size that was too small is not gone back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Means over one period."""

    learner_idle: float
    """Share of the time in which the learner waited for groups."""
    rollout_busy: float
    """Groups in flight at rollout workers, of those they could hold."""
    verifiers_busy: float
    """Groups being scored, of those that verifier workers could hold."""
    admission_blocked: float
    """Share of the time in which a rollout slot was free and the staleness bound or the queue let
    no group start."""


@dataclass(frozen=True, slots=True)
class Change:
    """A new target, and why."""

    role: Role
    target: int
    why: str


@dataclass(slots=True)
class _RoleMemory:
    wish: int = 0
    """Direction of the last looks."""
    looks: int = 0
    """How many of them agreed."""
    last_target: int | None = None
    quiet_until_s: float = float("-inf")
    too_small: dict[int, float] = field(default_factory=dict)
    """Sizes that starved the learner → until when they are not gone back to."""


class Autoscaler:
    """Decides for the rollout and the verifier fleet, each by itself."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._memory = {Role.ROLLOUT: _RoleMemory(), Role.VERIFIER: _RoleMemory()}

    def decide(
        self, load: Load, targets: Mapping[Role, int], settled: Mapping[Role, bool], now_s: float
    ) -> list[Change]:
        """Changes to make now, at most one per role.

        `targets` are the fleets' sizes, `settled` whether a fleet has reached its own: one that
        is still growing or draining is left alone.
        """
        wishes = {Role.ROLLOUT: self._rollout(load, targets), Role.VERIFIER: self._verifier(load)}
        changes = []
        for role, (wish, why) in wishes.items():
            target = self._next(role, wish, targets[role], settled[role], now_s)
            if target != targets[role]:
                changes.append(Change(role, target, why))
        return changes

    def _rollout(self, load: Load, targets: Mapping[Role, int]) -> tuple[int, str]:
        workers, config = targets[Role.ROLLOUT], self._config
        scoring_is_slow = load.verifiers_busy > load.rollout_busy
        if load.learner_idle > config.scale_up_idle:
            wanted = load.rollout_busy >= SATURATED and load.admission_blocked < 0.5
            return (+1 if wanted and not scoring_is_slow else 0), (
                f"the learner waited {load.learner_idle:.0%} of the time and rollout workers were "
                f"{load.rollout_busy:.0%} busy"
            )
        fewer_suffice = load.rollout_busy <= SPARE * (workers - 1) / workers
        if load.learner_idle < config.scale_down_idle and fewer_suffice:
            return -1, (
                f"the learner waited {load.learner_idle:.0%} of the time and rollout workers were "
                f"only {load.rollout_busy:.0%} busy"
            )
        return 0, ""

    def _verifier(self, load: Load) -> tuple[int, str]:
        config = self._config
        busy = f"verifier workers were {load.verifiers_busy:.0%} busy"
        if load.learner_idle > config.scale_up_idle and load.verifiers_busy >= SATURATED:
            return +1, f"the learner waited {load.learner_idle:.0%} of the time and {busy}"
        if load.verifiers_busy < 1 - SATURATED and load.learner_idle <= config.scale_up_idle:
            return -1, f"{busy} and the learner waited {load.learner_idle:.0%} of the time"
        return 0, ""

    def _next(self, role: Role, wish: int, target: int, settled: bool, now_s: float) -> int:
        memory = self._memory[role]
        if memory.last_target not in (None, target):
            # Somebody else has scaled it: what was seen before says nothing about this size.
            memory.wish = memory.looks = 0
            memory.quiet_until_s = now_s + self._config.cooldown_s
        memory.last_target = target
        if wish != memory.wish:
            memory.wish, memory.looks = wish, 0
        memory.looks += 1
        if not wish or not settled or now_s < memory.quiet_until_s:
            return target
        if memory.looks < self._config.patience:
            return target
        bounds = self._bounds(role)
        chosen = target + wish
        if not bounds.min_workers <= chosen <= bounds.max_workers:
            # Beyond its bounds, where somebody may have scaled it, a role is left alone.
            return target
        if chosen < target and memory.too_small.get(chosen, now_s) > now_s:
            return target
        if chosen != target:
            memory.quiet_until_s = now_s + self._config.cooldown_s
            memory.looks = 0
            memory.last_target = chosen
            if chosen > target:
                memory.too_small[target] = now_s + MEMORY_COOLDOWNS * self._config.cooldown_s
        return chosen

    def _bounds(self, role: Role) -> ScaleBounds:
        return self._config.rollout if role is Role.ROLLOUT else self._config.verifiers
