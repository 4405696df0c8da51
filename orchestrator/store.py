"""The trajectory store: one actor on the driver's node that owns every ready group.

A producer's objects die with it. The store pulls each verified group, joins rollout and verdict
columns, checks the contract, appends the result to the trajectory log and puts it under its own
ownership; only then is the group ready. It knows neither the queue nor the learner's loop.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from actors.trajectory import (
    FinishReason,
    VerdictStatus,
    token_versions,
    tokens,
    validate,
    with_verdicts,
)
from learner.batch import GroupEntry
from orchestrator.history.trajectory_log import TrajectoryLog
from orchestrator.history.transitions import GroupKey

STORE_TIMEOUT_S = 120.0
"""Seconds for one call to the store."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that may be trained: what the driver needs to decide, without its tokens."""

    entry: GroupEntry
    """What the learner is told; holds the reference to the group's record batch."""
    attempt: int
    nbytes: int
    """Size of the record batch in the object store."""
    oldest_version: int
    """Lowest version that sampled a token of the group."""
    segment: int
    """Where the trajectory log has it."""

    @property
    def total_tokens(self) -> int:
        """Response tokens over all samples of the group."""
        return sum(self.entry.response_tokens)


class TrajectoryStore:
    """Owner of ready groups; a Ray actor wraps it."""

    def __init__(self, put: Callable[[pa.RecordBatch], Any], log: TrajectoryLog) -> None:
        self._put = put
        self._log = log

    def append(self, rollout: pa.RecordBatch, verdicts: pa.RecordBatch) -> ReadyGroup:
        """Join, check, keep and own one group. Raises TrajectoryError when the contract is broken,
        OSError when the disk does not take it."""
        batch = with_verdicts(rollout, verdicts)
        validate(batch, verdicts=True)
        segment = self._log.append(batch)
        return summarise(batch, self._put(batch), segment)

    def ping(self) -> None:
        """Answers while the store lives."""

    def recall(self, wanted: Collection[GroupKey]) -> dict[GroupKey, ReadyGroup]:
        """Those of the wanted groups that the trajectory log still has, owned once more."""
        found = self._log.read(wanted)
        return {
            key: summarise(batch, self._put(batch), segment)
            for key, (segment, batch) in found.items()
        }

    def index(self) -> dict[GroupKey, int]:
        """The segment of every group in the log."""
        return self._log.index()

    def forget(self, segments: Collection[int]) -> None:
        """Delete segments of the log that nothing needs any more."""
        self._log.forget(segments)


def summarise(batch: pa.RecordBatch, ref: Any, segment: int) -> ReadyGroup:
    """Scalars of a verified group that the driver and the learner's plan need."""
    _, prompt_offsets = tokens(batch, "prompt_ids")
    _, response_offsets = tokens(batch, "response_ids")
    versions = token_versions(batch)
    status = batch.column("status").to_pylist()
    finish = batch.column("finish_reason").to_pylist()
    entry = GroupEntry(
        group_id=batch.column("group_id")[0].as_py(),
        ref=ref,
        sample_ids=tuple(batch.column("sample_id").to_pylist()),
        prompt_tokens=int(np.diff(prompt_offsets).max()),
        response_tokens=tuple(int(n) for n in np.diff(response_offsets)),
        rewards=tuple(batch.column("reward").to_pylist()),
        outcomes=tuple(batch.column("outcome").to_pylist()),
        ok=tuple(s == VerdictStatus.OK for s in status),
        truncated=tuple(f == FinishReason.LENGTH for f in finish),
    )
    return ReadyGroup(
        entry=entry,
        attempt=batch.column("attempt")[0].as_py(),
        nbytes=batch.nbytes,
        oldest_version=int(versions.min()),
        segment=segment,
    )
