"""Getting a learner back to where it was: the newest checkpoint, and the steps after it once more.

The same for a learner whose rank died in a live run and for a run whose driver was killed. The
ledger says which batches were trained and the trajectory log has their groups. A step is a function
of weights, kept versions, batch and schedule, so on the same hardware and number of ranks doing it
again gives the same weights bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

from learner.batch import StepRequest
from learner.group import LearnerGroup
from learner.messages import CheckpointError
from orchestrator.calls import within
from orchestrator.errors import RunError
from orchestrator.history.ledger_file import LedgerFile
from orchestrator.history.transitions import GroupKey, Stepped
from orchestrator.run_directory import RunDirectory
from orchestrator.store import STORE_TIMEOUT_S, ReadyGroup


async def recall(store: Any, wanted: Sequence[GroupKey]) -> dict[GroupKey, ReadyGroup]:
    """Groups of the trajectory log, in the object store once more; those it lacks are absent."""
    if not wanted:
        return {}
    return await within(
        store.recall.remote(list(wanted)), STORE_TIMEOUT_S, "reading the trajectory log"
    )


class Redo:
    """Does recorded steps again, on a learner that has just started."""

    def __init__(
        self,
        directory: RunDirectory,
        ledger: LedgerFile,
        store: Any,
        *,
        note: Callable[[str], None],
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """`progressed` is called after each step, for whoever watches that something moves."""
        self._directory = directory
        self._ledger = ledger
        self._store = store
        self._note = note
        self._progressed = progressed

    async def __call__(self, learner: LearnerGroup, *, step: int, start: int | None = None) -> None:
        """Bring `learner` to where it was after `step` steps, from the checkpoint after `start`
        (0: from the model that the run began with), by default the newest one.

        Raises RunError when the ledger or the log lacks something for it, or when a step does not
        end as it did.
        """
        version = 0
        if start is None:
            saved = [number for number in self._directory.checkpoint_steps() if number <= step]
            start = max(saved, default=0)
        if start:
            start, version = await self._load(learner, start)
        await self._ledger.flush()
        records = [r for r in self._ledger.steps_after(start) if r.step <= step]
        if [record.step for record in records] != list(range(start + 1, step + 1)):
            raise RunError(
                f"the ledger does not describe steps {start + 1} to {step}, which have to be done "
                f"again after the checkpoint of step {start}."
            )
        if records:
            self._note(f"doing steps {start + 1} to {step} again")
        for record in records:
            await self._repeat(learner, record, version)
            version = record.version
            self._progressed()

    async def _load(self, learner: LearnerGroup, step: int) -> tuple[int, int]:
        """Load the checkpoint of `step`, or the newest before it that can be read; its step and
        version."""
        older = [number for number in self._directory.checkpoint_steps() if number < step]
        try:
            state = await learner.load(str(self._directory.checkpoint(step)))
        except CheckpointError as error:
            if not older:
                raise
            self._note(f"{error}; going back to the checkpoint of step {older[-1]}")
            return await self._load(learner, older[-1])
        return step, state.version

    async def _repeat(self, learner: LearnerGroup, record: Stepped, version: int) -> None:
        groups = await recall(self._store, record.groups)
        if missing := [key for key in record.groups if key not in groups]:
            group_id, attempt = missing[0]
            raise RunError(
                f"step {record.step} cannot be done again: {len(missing)} of its groups, such as "
                f"{group_id} (attempt {attempt}), are not in the trajectory log."
            )
        entries = tuple(groups[key].entry for key in record.groups)
        request = StepRequest(
            record.step - 1, version, record.max_staleness, record.total_steps, entries
        )
        result = await learner.step(request)
        if result.version != record.version:
            raise RunError(
                f"step {record.step} led to version {record.version} and now leads to "
                f"{result.version}: the learner is not the one that trained it."
            )
