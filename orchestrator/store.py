"""The trajectory store: one actor on the driver's node that owns every ready group.

A producer's objects die with it. The store pulls each verified group, joins rollout and verdict
columns, checks the contract and puts the result under its own ownership; only then is the group
ready. It knows neither the queue nor the learner's loop.
"""

from collections.abc import Callable
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

    @property
    def total_tokens(self) -> int:
        """Response tokens over all samples of the group."""
        return sum(self.entry.response_tokens)


class TrajectoryStore:
    """Owner of ready groups; a Ray actor wraps it."""

    def __init__(self, put: Callable[[pa.RecordBatch], Any]) -> None:
        self._put = put

    def append(self, rollout: pa.RecordBatch, verdicts: pa.RecordBatch) -> ReadyGroup:
        """Join, check and own one group. Raises TrajectoryError when the contract is broken."""
        batch = with_verdicts(rollout, verdicts)
        validate(batch, verdicts=True)
        return summarise(batch, self._put(batch))


def summarise(batch: pa.RecordBatch, ref: Any) -> ReadyGroup:
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
    )
