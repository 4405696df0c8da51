"""Waves: the same groups with the same weights, in whatever order things happen."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.history.transitions import (
    Admitted,
    Dropped,
    Failed,
    Ready,
    Retried,
    Stepped,
    Transition,
)
from orchestrator.schedule import Waves


class Run:
    """Groups that end as `fate` says, generated and trained in an order that chance decides."""

    def __init__(self, batch: int, staleness: int, steps: int, fate: int, timing: int) -> None:
        self.batch, self.staleness, self.steps = batch, staleness, steps
        self.fate, self.chance = random.Random(fate), random.Random(timing)
        self.fates: list[str] = []
        self.waves = Waves(batch, staleness, steps)
        self.history: list[Transition] = []
        self.under_way: list[int] = []
        self.ready: set[int] = set()
        self.order: deque[int] = deque()
        self.generated_with: dict[int, int] = {}
        self.lags: list[int] = []
        self.step = 0

    def tell(self, *transitions: Transition) -> None:
        for transition in transitions:
            self.history.append(transition)
            self.waves.apply(transition)

    def fate_of(self, group: int) -> str:
        while len(self.fates) <= group:
            self.fates.append(self.fate.choice(["ready"] * 4 + ["zero_variance", "failed"]))
        return self.fates[group]

    def play(self) -> None:
        """Until all steps are done; fails if nothing can move before that."""
        while self.step < self.steps:
            moves = [move for move in (self.admit, self.end, self.train) if move(really=False)]
            assert moves, "nothing can move"
            self.chance.choice(moves)(really=True)

    def admit(self, *, really: bool) -> bool:
        if not self.waves.admits():
            return False
        if really:
            group = len(self.generated_with)
            version = self.waves.version()
            assert version is not None
            self.generated_with[group] = version
            self.under_way.append(group)
            self.order.append(group)
            self.tell(Admitted(group, "task", 1))
        return True

    def end(self, *, really: bool) -> bool:
        if really:
            group = self.under_way.pop(self.chance.randrange(len(self.under_way)))
            match self.fate_of(group):
                case "ready":
                    if self.chance.random() < 0.3:
                        self.tell(Retried(group, "worker_lost"))
                    self.ready.add(group)
                    self.tell(Ready(group, 0))
                case "failed":
                    self.order.remove(group)
                    self.tell(Failed(group, "verifier_lost"))
                case reason:
                    self.order.remove(group)
                    self.tell(Dropped(group, reason))
            return True
        return bool(self.under_way)

    def train(self, *, really: bool) -> bool:
        first = list(self.order)[: self.batch]
        if len(first) < self.batch or not self.ready.issuperset(first):
            return False
        if really:
            self.lags += [self.step - self.generated_with[group] for group in first]
            for _ in first:
                self.order.popleft()
            self.step += 1
            self.tell(Stepped(self.step, self.step, self.staleness, self.steps, ()))
        return True


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 7), st.integers(0, 9), st.integers(0, 999)
)
def test_every_timing_gives_the_same_run(batch, staleness, steps, fate, timing):
    runs = [Run(batch, staleness, steps, fate, when) for when in (timing, timing + 1)]
    for run in runs:
        run.play()
        assert run.waves.over and run.waves.version() is None and not run.waves.admits()
        assert max(run.lags) <= staleness
    assert runs[0].generated_with == runs[1].generated_with
    assert (
        runs[0].fates[: len(runs[0].generated_with)] == runs[1].fates[: len(runs[1].generated_with)]
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(0, 999), st.integers(0, 60))
def test_a_replayed_history_gives_the_same_schedule(fate, timing, length):
    run = Run(2, 2, 6, fate, timing)
    run.play()
    once, again = Waves(2, 2, 6), Waves(2, 2, 6)
    for transition in run.history[:length]:
        once.apply(transition)
        again.apply(transition)
    assert (once.version(), once.admits()) == (again.version(), again.admits())
    for transition in run.history[length:]:
        again.apply(transition)
    assert again.over


def test_the_lag_is_exactly_the_bound_once_the_first_wave_is_used_up():
    run = Run(2, 2, 8, fate=3, timing=5)
    run.play()
    assert run.lags == [0, 0, 1, 1] + [2] * 12
