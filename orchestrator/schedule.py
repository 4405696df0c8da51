"""The schedule of a deterministic run: which weights generate which groups, whatever the timing.

Groups come in waves. Wave k is generated with the weights after step k, by workers that load no
others meanwhile, and ends once it has brought one batch of groups that can be trained; the first
wave brings 1 + η batches. Steps consume in admission order, so every token trains with a lag of
exactly η, and the learner works on older waves while a newer one is generated. A group that turns
out to teach nothing is replaced in its own wave; how many are admitted to a wave follows from
outcomes alone.

A pure reducer over the ledger's transitions: replaying them gives the same schedule.
"""

from orchestrator.history.transitions import (
    Admitted,
    Dropped,
    Failed,
    Ready,
    Retried,
    Stepped,
    Transition,
)


class Waves:
    """The wave that is being generated."""

    def __init__(self, batch_groups: int, max_staleness: int, steps: int) -> None:
        self._batch_groups = batch_groups
        self._max_staleness = max_staleness
        self._steps = steps
        self._wave = 0
        self._unresolved: set[int] = set()
        self._useful: set[int] = set()
        self._versions = [0]

    def apply(self, transition: Transition) -> None:
        """Take account of what happened."""
        match transition:
            case Admitted(group_id=group_id):
                self._unresolved.add(group_id)
            case Ready(group_id=group_id) if group_id in self._unresolved:
                self._unresolved.discard(group_id)
                self._useful.add(group_id)
            case Dropped(reason="skipped_batch"):
                pass  # of a step, which ends a wave as any other does
            case Dropped(group_id=group_id) | Failed(group_id=group_id):
                # One that has left the wave with the others is in neither.
                self._unresolved.discard(group_id)
                self._useful.discard(group_id)
            case Retried(group_id=group_id) if group_id in self._useful:
                self._useful.discard(group_id)
                self._unresolved.add(group_id)
            case Stepped(version=version):
                self._versions.append(version)
            case _:
                pass
        while self._complete() and len(self._versions) > self._wave + 1:
            self._wave += 1
            self._useful.clear()

    @property
    def over(self) -> bool:
        """Whether everything that the run's steps consume has been generated."""
        return self._wave > 0 and self._wave + self._max_staleness >= self._steps

    def admits(self) -> bool:
        """Whether the wave needs another group."""
        return not self.over and len(self._useful) + len(self._unresolved) < self._size()

    def version(self) -> int | None:
        """The version that the wave is generated with; None once no wave is needed."""
        return None if self.over else self._versions[self._wave]

    def _size(self) -> int:
        batches = min(1 + self._max_staleness, self._steps) if self._wave == 0 else 1
        return batches * self._batch_groups

    def _complete(self) -> bool:
        # More than its size: the run was made shorter after they had been generated.
        return not self._unresolved and len(self._useful) >= self._size()
