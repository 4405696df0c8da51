"""Which segments of the trajectory log are still needed. Pure."""

from collections.abc import Mapping

from orchestrator.history.transitions import GroupKey, Stepped, Transition


class Retention:
    """A segment is needed by groups that are on their way, and by steps that would have to be done
    again after the oldest checkpoint."""

    def __init__(self) -> None:
        self._steps: dict[GroupKey, int] = {}
        self._segment_of: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._last_step: dict[int, int] = {}

    def apply(self, transition: Transition) -> None:
        """Take account of a history that is replayed: of which step each group was part."""
        if isinstance(transition, Stepped):
            self._steps |= dict.fromkeys(transition.groups, transition.step)

    def found(self, segments: Mapping[GroupKey, int]) -> None:
        """After a replay: where groups lie that are in the log. Those of no step left without."""
        for key, segment in segments.items():
            self.used(segment, self._steps.get(key, 0))
        self._steps.clear()

    def kept(self, group_id: int, segment: int) -> None:
        """A group is in `segment` and on its way to the learner."""
        self.left(group_id, None)  # an earlier attempt of it
        self.used(segment, 0)
        self._segment_of[group_id] = segment
        self._live[segment] += 1

    def left(self, group_id: int, step: int | None) -> None:
        """A group was part of batch step `step`, or left without (None). Unknown ones are fine."""
        segment = self._segment_of.pop(group_id, None)
        if segment is None:
            return
        self._live[segment] -= 1
        self.used(segment, step or 0)

    def used(self, segment: int, step: int) -> None:
        """Groups of `segment` were part of steps up to `step`."""
        self._last_step[segment] = max(self._last_step.get(segment, 0), step)
        self._live.setdefault(segment, 0)

    def release(self, oldest_checkpoint: int) -> list[int]:
        """Segments that nothing needs once the oldest checkpoint is the one after step
        `oldest_checkpoint`; they are forgotten here. The newest stays: it may be being written."""
        newest = max(self._live, default=0)
        free = [
            segment
            for segment, live in self._live.items()
            if not live and segment < newest and self._last_step[segment] <= oldest_checkpoint
        ]
        for segment in free:
            del self._live[segment]
            del self._last_step[segment]
        return sorted(free)
