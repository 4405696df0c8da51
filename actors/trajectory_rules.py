"""Schema and rules of the trajectory format, each checked without a Python loop over tokens.

`actors.trajectory` is the door to it for everyone else. This module reads and refuses batches;
it does not build them.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FORMAT_VERSION = 1

KEY_FORMAT = b"slipstream.format_version"
_KEY_TOKENIZER = b"slipstream.tokenizer"
_KEY_MODEL = b"slipstream.model"
_KEY_LINEAGE = b"slipstream.lineage"

WHOLE_BATCH = "(whole batch)"
INT32_MAX = np.iinfo(np.int32).max

SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("version_spans", pa.list_(SPAN), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("seed", pa.int64()),
    ]
)
VERDICT_SCHEMA = pa.schema(
    [
        pa.field("reward", pa.float64()),
        pa.field("outcome", pa.float64()),
        pa.field("parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("verify_s", pa.float64(), nullable=False),
    ]
)
VERDICT_BATCH_SCHEMA = pa.schema([ROLLOUT_SCHEMA.field("sample_id"), *VERDICT_SCHEMA])


class FinishReason(StrEnum):
    """Why generation ended. `LENGTH` means truncated: the last token is no end of sequence."""

    STOP = "stop"
    LENGTH = "length"


class VerdictStatus(StrEnum):
    """What came of verifying a sample. Only `OK` carries a reward."""

    OK = "ok"
    UNSCORABLE = "unscorable"
    ERROR = "error"
    TIMEOUT = "timeout"


class TrajectoryError(ValueError):
    """A batch breaks the contract. `sample`, `column` and `rule` say where and how."""

    def __init__(self, sample: str, column: str, rule: str) -> None:
        super().__init__(sample, column, rule)
        self.sample = sample
        self.column = column
        self.rule = rule

    def __str__(self) -> str:
        return f"sample {self.sample}, column {self.column}: {self.rule}"


@dataclass(frozen=True, slots=True)
class TrajectoryMeta:
    """What all rows of a batch share: tokenizer fingerprint, model, lineage of the versions."""

    tokenizer: str
    model: str
    lineage: int = 0


def validate(batch: pa.RecordBatch, *, verdicts: bool) -> None:
    """Raises TrajectoryError at the first broken rule; additional columns are allowed.

    Checks the format version, columns and types, nulls, unique sample ids, equal lengths per row,
    spans that tile the response, finite log-probabilities that are 0.0 where the loss mask is
    false, and value ranges; with `verdicts` also the verdict columns.
    """
    read_meta(batch)
    _check_columns(batch, ROLLOUT_SCHEMA)
    if verdicts:
        _check_columns(batch, VERDICT_SCHEMA)
    _check_unique_ids(batch)
    _check_token_columns(batch)
    _check_spans(batch)
    _check_scalars(batch)
    if verdicts:
        _check_verdicts(batch)


def validate_verdict_batch(batch: pa.RecordBatch) -> None:
    _check_format(batch.schema.metadata or {})
    _check_columns(batch, VERDICT_BATCH_SCHEMA)
    _check_unique_ids(batch)
    _check_verdicts(batch)


def read_meta(batch: pa.RecordBatch) -> TrajectoryMeta:
    """The schema metadata; TrajectoryError when absent or of an unknown format version."""
    metadata = batch.schema.metadata or {}
    _check_format(metadata)
    values = {}
    for key in (_KEY_TOKENIZER, _KEY_MODEL, _KEY_LINEAGE):
        if key not in metadata:
            raise TrajectoryError(WHOLE_BATCH, "(metadata)", f"{key.decode()} is missing")
        values[key] = metadata[key].decode()
    if not is_decimal(values[_KEY_LINEAGE]):
        rule = f"lineage is a non-negative integer, got {values[_KEY_LINEAGE]!r}"
        raise TrajectoryError(WHOLE_BATCH, "(metadata)", rule)
    return TrajectoryMeta(values[_KEY_TOKENIZER], values[_KEY_MODEL], int(values[_KEY_LINEAGE]))


def encode_meta(meta: TrajectoryMeta) -> dict[bytes, str]:
    return {
        KEY_FORMAT: str(FORMAT_VERSION),
        _KEY_TOKENIZER: meta.tokenizer,
        _KEY_MODEL: meta.model,
        _KEY_LINEAGE: str(meta.lineage),
    }


def tokens(batch: pa.RecordBatch, column: str) -> tuple[np.ndarray, np.ndarray]:
    """A list column of numbers as (flat values [tokens], offsets int64 [rows + 1]).

    Row i is `values[offsets[i]:offsets[i + 1]]`; slices of a batch are honoured. Values are a
    read-only view of Arrow's memory, except booleans, which Arrow packs and this unpacks.
    """
    flat, offsets = flat_list(batch.column(column))
    return to_numpy(flat), offsets


def flat_list(array: pa.ListArray) -> tuple[pa.Array, np.ndarray]:
    offsets = array.offsets.to_numpy().astype(np.int64)
    flat = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return flat, offsets - offsets[0]


def to_numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))


def is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit()


def refuse(
    bad_rows: np.ndarray, ids: pa.Array, column: str, rule: str, found: np.ndarray | None = None
) -> None:
    """Raises for the first true row of `bad_rows`, quoting the row's entry of `found`."""
    if not bad_rows.any():
        return
    row = int(np.argmax(bad_rows))
    quoted = "" if found is None else f", got {found[row]}"
    raise TrajectoryError(_row_name(ids, row), column, rule + quoted)


def _refuse_tokens(
    bad: np.ndarray, offsets: np.ndarray, ids: pa.Array, column: str, rule: str, found: np.ndarray
) -> None:
    """As `refuse`, for flat token values: also names the position within the row."""
    if not bad.any():
        return
    index = int(np.argmax(bad))
    row = int(np.searchsorted(offsets, index, side="right")) - 1
    where = f", got {found[index]} at position {index - offsets[row]}"
    raise TrajectoryError(_row_name(ids, row), column, rule + where)


def _row_name(ids: pa.Array, row: int) -> str:
    return ids[row].as_py() or f"(row {row})"


def _check_format(metadata: dict[bytes, bytes]) -> None:
    found = metadata.get(KEY_FORMAT, b"none").decode(errors="replace")
    if found != str(FORMAT_VERSION):
        rule = f"this reader knows format version {FORMAT_VERSION}, the batch has {found}"
        raise TrajectoryError(WHOLE_BATCH, "(metadata)", rule)


def _check_columns(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    for column in schema:
        positions = batch.schema.get_all_field_indices(column.name)
        if len(positions) != 1:
            rule = "column is missing" if not positions else "column is there more than once"
            raise TrajectoryError(WHOLE_BATCH, column.name, rule)
        array = batch.column(positions[0])
        if array.type != column.type:
            rule = f"column has type {array.type}, expected {column.type}"
            raise TrajectoryError(WHOLE_BATCH, column.name, rule)
        if not column.nullable and array.null_count:
            refuse(to_numpy(array.is_null()), _ids_or_rows(batch), column.name, "value is null")
        if isinstance(array, pa.ListArray):
            _check_no_null_items(batch, column.name, array)


def _ids_or_rows(batch: pa.RecordBatch) -> pa.Array:
    """Sample ids for a message while the id column itself may still be missing or mistyped."""
    index = batch.schema.get_field_index("sample_id")
    if index >= 0 and pa.types.is_string(batch.schema.field(index).type):
        return batch.column(index)
    return pa.nulls(batch.num_rows, pa.string())


def _check_no_null_items(batch: pa.RecordBatch, name: str, array: pa.ListArray) -> None:
    flat, offsets = flat_list(array)
    parts = [flat, *(flat.flatten() if pa.types.is_struct(flat.type) else [])]
    for part in parts:
        if part.null_count:
            nulls = to_numpy(part.is_null())
            found = np.full(len(nulls), "null")
            _refuse_tokens(nulls, offsets, _ids_or_rows(batch), name, "items are never null", found)


def _check_unique_ids(batch: pa.RecordBatch) -> None:
    ids = batch.column("sample_id")
    counts = pc.value_counts(ids)
    repeated = to_numpy(counts.field("counts")) > 1
    refuse(repeated, counts.field("values"), "sample_id", "sample ids are unique in a batch")


def _check_token_columns(batch: pa.RecordBatch) -> None:
    ids = batch.column("sample_id")
    for column in ("prompt_ids", "response_ids"):
        values, offsets = tokens(batch, column)
        _refuse_tokens(values < 0, offsets, ids, column, "token ids are not negative", values)
    length = np.diff(tokens(batch, "response_ids")[1])
    for column in ("behavior_logprobs", "loss_mask"):
        found = np.diff(tokens(batch, column)[1])
        rule = "ragged lists: its length differs from the number of response tokens"
        refuse(found != length, ids, column, rule, found)
    logprobs, offsets = tokens(batch, "behavior_logprobs")
    trained = tokens(batch, "loss_mask")[0]
    column = "behavior_logprobs"
    rule = "log-probabilities are finite"
    _refuse_tokens(~np.isfinite(logprobs), offsets, ids, column, rule, logprobs)
    rule = "log-probabilities are 0.0 where the loss mask is false"
    _refuse_tokens(~trained & (logprobs != 0), offsets, ids, column, rule, logprobs)


def _check_spans(batch: pa.RecordBatch) -> None:
    ids, column = batch.column("sample_id"), "version_spans"
    spans, offsets = flat_list(batch.column(column))
    version, start, end = (to_numpy(spans.field(name)) for name in ("version", "start", "end"))
    _refuse_tokens(version < 0, offsets, ids, column, "versions are not negative", version)
    _refuse_tokens(start >= end, offsets, ids, column, "a span has end > start", end)
    length = np.diff(tokens(batch, "response_ids")[1])
    filled = offsets[1:] > offsets[:-1]
    expected_start = np.concatenate([[0], end[:-1]]).astype(np.int64)[: len(start)]
    expected_start[offsets[:-1][filled]] = 0
    rule = "spans tile the response: a span starts where the one before ends, the first at 0"
    _refuse_tokens(start != expected_start, offsets, ids, column, rule, start)
    covered = np.zeros(len(length), np.int64)
    covered[filled] = end[offsets[1:][filled] - 1]
    rule = "spans tile the response: the last ends at its length"
    refuse(covered != length, ids, column, rule, covered)


def _check_scalars(batch: pa.RecordBatch) -> None:
    ids = batch.column("sample_id")
    for column in ("sample_index", "attempt"):
        values = to_numpy(batch.column(column))
        refuse(values < 0, ids, column, "value is not negative", values)
    for column in ("started_at", "finished_at"):
        values = to_numpy(batch.column(column))
        refuse(~np.isfinite(values), ids, column, "times are finite", values)
    heat = to_numpy(batch.column("temperature"))
    rule = "temperature is finite and above 0"
    refuse(~(np.isfinite(heat) & (heat > 0)), ids, "temperature", rule, heat)
    _check_member(batch, "finish_reason", FinishReason)


def _check_member(batch: pa.RecordBatch, column: str, members: type[StrEnum]) -> None:
    values = batch.column(column)
    known = pc.is_in(values, pa.array([str(member) for member in members], pa.string()))
    rule = f"value is one of {', '.join(members)}"
    found = values.to_numpy(zero_copy_only=False)
    refuse(~to_numpy(known), batch.column("sample_id"), column, rule, found)


def _check_verdicts(batch: pa.RecordBatch) -> None:
    ids = batch.column("sample_id")
    _check_member(batch, "status", VerdictStatus)
    ok = to_numpy(pc.equal(batch.column("status"), VerdictStatus.OK.value))
    reward = batch.column("reward")
    finite = to_numpy(pc.fill_null(pc.is_finite(reward), False))
    found = reward.to_numpy(zero_copy_only=False)
    refuse(ok & ~finite, ids, "reward", "reward is finite where the status is ok", found)
    given = to_numpy(reward.is_valid())
    refuse(~ok & given, ids, "reward", "reward is null where the status is not ok", found)
    outcome = batch.column("outcome")
    broken = ~to_numpy(pc.fill_null(pc.is_finite(outcome), True))
    found = outcome.to_numpy(zero_copy_only=False)
    refuse(broken, ids, "outcome", "outcome is null or finite", found)
    seconds = to_numpy(batch.column("verify_s"))
    rule = "seconds are finite and not negative"
    refuse(~(np.isfinite(seconds) & (seconds >= 0)), ids, "verify_s", rule, seconds)
    parts, offsets = flat_list(batch.column("parts"))
    worth = parts.field("value").to_numpy(zero_copy_only=False)
    _refuse_tokens(~np.isfinite(worth), offsets, ids, "parts", "parts are finite", worth)
