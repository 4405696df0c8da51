"""The trajectory contract: one Arrow record batch per group, one row per sample.

Rollout workers write the rollout columns, verifiers append the verdict columns, nothing is ever
rewritten. This module builds, checks and reads such batches; it knows neither how samples are
generated nor what a batch is used for. Token columns are flat Arrow lists, so a reader in another
process sees them without a copy, and text is never re-tokenised between sampling and training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.trajectory_rules import (
    FORMAT_VERSION,
    INT32_MAX,
    KEY_FORMAT,
    ROLLOUT_SCHEMA,
    SPAN,
    VERDICT_BATCH_SCHEMA,
    VERDICT_SCHEMA,
    WHOLE_BATCH,
    FinishReason,
    TrajectoryError,
    TrajectoryMeta,
    VerdictStatus,
    encode_meta,
    flat_list,
    is_decimal,
    read_meta,
    refuse,
    to_numpy,
    tokens,
    validate,
    validate_verdict_batch,
)

__all__ = [
    "FORMAT_VERSION",
    "ROLLOUT_SCHEMA",
    "VERDICT_SCHEMA",
    "FinishReason",
    "RolloutSample",
    "TrajectoryError",
    "TrajectoryMeta",
    "VerdictRow",
    "VerdictStatus",
    "VersionSpan",
    "WeightLabel",
    "read_meta",
    "rollout_batch",
    "sample_id",
    "token_versions",
    "tokens",
    "validate",
    "verdict_batch",
    "with_verdicts",
]


@dataclass(frozen=True, order=True, slots=True)
class WeightLabel:
    """Names one set of weights: no label is ever used twice, as recovery raises the lineage."""

    lineage: int
    version: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`; raises ValueError on anything but two non-negative integers."""
        lineage, dot, version = text.partition(".")
        if not (dot and is_decimal(lineage) and is_decimal(version)):
            raise ValueError(f"a weight label reads LINEAGE.VERSION, such as 0.12; got {text!r}")
        return cls(int(lineage), int(version))


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One row of rollout columns. Times are unix seconds; log-probabilities are natural logs
    under the sampling distribution (temperature applied), 0.0 where `loss_mask` is false."""

    sample_id: str
    group_id: int
    task_id: str
    sample_index: int
    attempt: int
    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    behavior_logprobs: Sequence[float] | np.ndarray
    loss_mask: Sequence[bool] | np.ndarray
    version_spans: Sequence[VersionSpan]
    finish_reason: str
    worker: str
    started_at: float
    finished_at: float
    temperature: float
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One row of verdict columns. `reward` is None unless `status` is ok; `outcome` is the
    result before shaping, None where the verifier has none."""

    sample_id: str
    reward: float | None
    outcome: float | None
    status: str
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    verify_s: float = 0.0


def sample_id(group_id: int, attempt: int, index: int) -> str:
    """The identity of a sample: unique in a run, and new for each attempt of a group."""
    return f"{group_id}-{attempt}-{index}"


def rollout_batch(samples: Sequence[RolloutSample], meta: TrajectoryMeta) -> pa.RecordBatch:
    """The validated batch of these samples, in their order; TrajectoryError if a rule is broken."""
    ids = [sample.sample_id for sample in samples]
    columns = []
    for column in ROLLOUT_SCHEMA:
        values = [getattr(sample, column.name) for sample in samples]
        if column.name == "version_spans":
            columns.append(_span_column(values, ids))
        elif pa.types.is_list(column.type):
            columns.append(_list_column(column, values, ids))
        else:
            columns.append(_scalar_column(column, values, ids))
    schema = ROLLOUT_SCHEMA.with_metadata(encode_meta(meta))
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    validate(batch, verdicts=False)
    return batch


def verdict_batch(rows: Sequence[VerdictRow]) -> pa.RecordBatch:
    """Sample ids and verdict columns, validated, in the order given."""
    ids = [row.sample_id for row in rows]
    columns = []
    for column in VERDICT_BATCH_SCHEMA:
        values = [getattr(row, column.name) for row in rows]
        if column.name == "parts":
            values = [list(parts.items()) for parts in values]
        columns.append(_scalar_column(column, values, ids))
    schema = VERDICT_BATCH_SCHEMA.with_metadata({KEY_FORMAT: str(FORMAT_VERSION)})
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    validate_verdict_batch(batch)
    return batch


def with_verdicts(batch: pa.RecordBatch, verdicts: pa.RecordBatch) -> pa.RecordBatch:
    """`batch` with the verdict columns appended, matched by sample id.

    The rollout columns are shared, not copied. Raises TrajectoryError when the two do not cover
    the same samples, when `batch` has verdicts already, or when `verdicts` breaks a rule.
    """
    validate(batch, verdicts=False)
    validate_verdict_batch(verdicts)
    for name in VERDICT_SCHEMA.names:
        if name in batch.schema.names:
            raise TrajectoryError(WHOLE_BATCH, name, "has verdicts already; they are never redone")
    ours, theirs = batch.column("sample_id"), verdicts.column("sample_id")
    refuse(~to_numpy(pc.is_in(ours, theirs)), ours, "sample_id", "has no verdict")
    refuse(~to_numpy(pc.is_in(theirs, ours)), theirs, "sample_id", "has a verdict but no rollout")
    rows = pc.index_in(ours, value_set=theirs)
    appended = [verdicts.column(name).take(rows) for name in VERDICT_SCHEMA.names]
    schema = pa.schema([*batch.schema, *VERDICT_SCHEMA], metadata=batch.schema.metadata)
    return pa.RecordBatch.from_arrays([*batch.columns, *appended], schema=schema)


def token_versions(batch: pa.RecordBatch) -> np.ndarray:
    """int64 [response tokens of all rows]: the version that sampled each token."""
    spans, _ = flat_list(batch.column("version_spans"))
    version, start, end = (to_numpy(spans.field(name)) for name in ("version", "start", "end"))
    return np.repeat(version, end - start)


def _scalar_column(column: pa.Field, values: list[Any], ids: list[str]) -> pa.Array:
    try:
        return pa.array(values, column.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        for name, value in zip(ids, values, strict=True):
            try:
                pa.array([value], column.type)
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                rule = f"expected {column.type}, got {value!r}"
                raise TrajectoryError(str(name), column.name, rule) from error
        raise


def _list_column(column: pa.Field, values: list[Any], ids: list[str]) -> pa.Array:
    item = column.type.value_type
    rows = [
        _flat_row(value, item, name, column.name) for value, name in zip(values, ids, strict=True)
    ]
    flat = np.concatenate([np.empty(0, item.to_pandas_dtype()), *rows])
    return pa.ListArray.from_arrays(_offsets(rows), pa.array(flat, item))


def _flat_row(value: Any, item: pa.DataType, name: str, column: str) -> np.ndarray:
    dtype = np.dtype(item.to_pandas_dtype())
    row = np.asarray(value)
    if row.ndim == 1 and row.size == 0:
        return np.empty(0, dtype)
    kinds = {"i": "iu", "f": "fiu", "b": "b"}[dtype.kind]
    if row.ndim != 1 or row.dtype.kind not in kinds:
        rule = f"expected a flat list of {item}, got {row.ndim} dimensions of {row.dtype}"
        raise TrajectoryError(name, column, rule)
    if dtype.kind == "i" and (row.min() < 0 or row.max() > INT32_MAX):
        rule = f"token ids lie in [0, {INT32_MAX}], got {row.min()} to {row.max()}"
        raise TrajectoryError(name, column, rule)
    return row.astype(dtype, copy=False)


def _span_column(values: list[Sequence[VersionSpan]], ids: list[str]) -> pa.Array:
    spans = [span for row in values for span in row]
    owners = [name for name, row in zip(ids, values, strict=True) for _ in row]
    children = [
        _scalar_column(
            pa.field("version_spans", child.type), [getattr(s, child.name) for s in spans], owners
        )
        for child in SPAN
    ]
    flat = pa.StructArray.from_arrays(children, fields=list(SPAN))
    return pa.ListArray.from_arrays(_offsets(values), flat)


def _offsets(rows: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, rows)]), pa.int32())
