"""The trajectory contract: what goes in comes out, and every broken rule is named."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.trajectory import (
    FORMAT_VERSION,
    ROLLOUT_SCHEMA,
    VERDICT_SCHEMA,
    FinishReason,
    RolloutSample,
    TrajectoryError,
    TrajectoryMeta,
    VerdictRow,
    VerdictStatus,
    VersionSpan,
    WeightLabel,
    read_meta,
    rollout_batch,
    sample_id,
    token_versions,
    tokens,
    validate,
    verdict_batch,
    with_verdicts,
)

META = TrajectoryMeta(tokenizer="sha256:ab", model="tiny", lineage=3)
TOKEN_IDS = st.integers(0, 2**31 - 1)
# No verdict may hang on how busy the machine is.
untimed = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LOGPROBS = st.floats(-1024.0, 0.0, width=32, allow_subnormal=False)


@st.composite
def span_lists(draw: st.DrawFn, length: int) -> list[VersionSpan]:
    if length == 0:
        return []
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {0, length})
    versions = sorted(draw(st.lists(st.integers(0, 2**40), min_size=5, max_size=5)))
    return [VersionSpan(v, a, b) for v, a, b in zip(versions, cuts, cuts[1:], strict=False)]


@st.composite
def samples(draw: st.DrawFn, index: int) -> RolloutSample:
    length = draw(st.integers(0, 7))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return RolloutSample(
        sample_id=sample_id(7, 1, index),
        group_id=7,
        task_id=draw(st.sampled_from(["", "sum-1", "größe"])),
        sample_index=index,
        attempt=1,
        prompt_ids=draw(st.lists(TOKEN_IDS, max_size=5)),
        response_ids=draw(st.lists(TOKEN_IDS, min_size=length, max_size=length)),
        behavior_logprobs=[draw(LOGPROBS) if kept else 0.0 for kept in mask],
        loss_mask=mask,
        version_spans=draw(span_lists(length)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        worker="rollout-0",
        started_at=draw(st.floats(0, 2e9, allow_subnormal=False)),
        finished_at=draw(st.floats(0, 2e9, allow_subnormal=False)),
        temperature=draw(st.floats(0.125, 4, width=32)),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def sample_lists(draw: st.DrawFn, min_size: int = 0) -> list[RolloutSample]:
    return [draw(samples(index)) for index in range(draw(st.integers(min_size, 4)))]


def three_samples() -> list[RolloutSample]:
    def sample(index: int, length: int, spans: list[VersionSpan]) -> RolloutSample:
        return RolloutSample(
            sample_id=sample_id(7, 0, index),
            group_id=7,
            task_id="sum-1",
            sample_index=index,
            attempt=0,
            prompt_ids=[5, 6],
            response_ids=np.arange(length, dtype=np.int32),
            behavior_logprobs=np.full(length, -0.5, np.float32),
            loss_mask=np.ones(length, bool),
            version_spans=spans,
            finish_reason="stop",
            worker="rollout-0",
            started_at=1.0,
            finished_at=2.0,
            temperature=1.0,
        )

    two = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 4)]
    return [sample(0, 2, [VersionSpan(3, 0, 2)]), sample(1, 4, two), sample(2, 0, [])]


def three_verdicts() -> list[VerdictRow]:
    return [
        VerdictRow("7-0-0", 1.0, 1.0, "ok", {"answer": 1.0, "format": 0.5}, "", 0.1),
        VerdictRow("7-0-1", None, None, "timeout", {}, "10 s passed", 10.0),
        VerdictRow("7-0-2", -0.25, None, "ok"),
    ]


def full_batch() -> pa.RecordBatch:
    return with_verdicts(rollout_batch(three_samples(), META), verdict_batch(three_verdicts()))


def replaced(batch: pa.RecordBatch, column: str, values: object) -> pa.RecordBatch:
    index = batch.schema.get_field_index(column)
    old = batch.schema.field(index)
    array = values if isinstance(values, pa.Array) else pa.array(values, old.type)
    return batch.set_column(index, old.with_type(array.type), array)


def refusal(call: Callable[[], object]) -> TrajectoryError:
    with pytest.raises(TrajectoryError) as caught:
        call()
    error = caught.value
    assert error.sample in str(error) and error.column in str(error) and error.rule in str(error)
    return error


@untimed
@given(sample_lists())
def test_rollout_round_trip(rows: list[RolloutSample]) -> None:
    batch = rollout_batch(rows, META)
    assert read_meta(batch) == META
    assert batch.num_rows == len(rows)
    for name in ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask"):
        values, offsets = tokens(batch, name)
        assert offsets.dtype == np.int64 and len(offsets) == len(rows) + 1
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(values[offsets[i] : offsets[i + 1]], getattr(row, name))
    listed = {"prompt_ids", "response_ids", "behavior_logprobs", "loss_mask", "version_spans"}
    for name in {f.name for f in fields(RolloutSample)} - listed:
        assert batch.column(name).to_pylist() == [getattr(row, name) for row in rows]
    expected = [s.version for r in rows for s in r.version_spans for _ in range(s.start, s.end)]
    assert token_versions(batch).tolist() == expected


@untimed
@given(sample_lists(), st.randoms(use_true_random=False))
def test_verdicts_are_matched_by_sample_id(rows: list[RolloutSample], random: object) -> None:
    rollouts = rollout_batch(rows, META)
    verdicts = [VerdictRow(row.sample_id, row.sample_index / 8, None, "ok") for row in rows]
    random.shuffle(verdicts)
    batch = with_verdicts(rollouts, verdict_batch(verdicts))
    validate(batch, verdicts=True)
    assert batch.column("reward").to_pylist() == [row.sample_index / 8 for row in rows]
    assert batch.schema.names == ROLLOUT_SCHEMA.names + VERDICT_SCHEMA.names
    assert read_meta(batch) == META


def test_verdict_columns_keep_their_values() -> None:
    batch = full_batch()
    assert batch.column("reward").to_pylist() == [1.0, None, -0.25]
    assert batch.column("outcome").to_pylist() == [1.0, None, None]
    assert batch.column("parts").to_pylist()[0] == [("answer", 1.0), ("format", 0.5)]
    assert batch.column("status").to_pylist() == ["ok", "timeout", "ok"]
    assert batch.column("detail").to_pylist() == ["", "10 s passed", ""]
    assert batch.column("verify_s").to_pylist() == [0.1, 10.0, 0.0]


def test_appending_verdicts_copies_no_rollout_column() -> None:
    rollouts = rollout_batch(three_samples(), META)
    batch = with_verdicts(rollouts, verdict_batch(three_verdicts()))
    for name in ("prompt_ids", "response_ids", "behavior_logprobs"):
        assert tokens(batch, name)[0].ctypes.data == tokens(rollouts, name)[0].ctypes.data


@untimed
@given(sample_lists(min_size=1), st.data())
def test_slices_are_honoured(rows: list[RolloutSample], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    verdicts = verdict_batch([VerdictRow(r.sample_id, 0.5, None, "ok") for r in rows])
    whole = with_verdicts(rollout_batch(rows, META), verdicts)
    part = whole.slice(start, stop - start)
    validate(part, verdicts=True)
    alone = rollout_batch(rows[start:stop], META)
    for name in ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask"):
        for got, expected in zip(tokens(part, name), tokens(alone, name), strict=True):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(token_versions(part), token_versions(alone))


def test_token_views_share_memory_with_the_batch_and_are_read_only() -> None:
    batch = full_batch()
    for name in ("prompt_ids", "response_ids", "behavior_logprobs"):
        values, _ = tokens(batch, name)
        buffer = np.frombuffer(batch.column(name).values.buffers()[1], np.uint8)
        assert np.shares_memory(values, buffer)
        assert not values.flags.writeable


@untimed
@given(sample_lists())
def test_pickle_out_of_band_is_equal_and_copies_nothing(rows: list[RolloutSample]) -> None:
    batch = rollout_batch(rows, META)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    copy = pickle.loads(stream, buffers=raw)
    assert copy.equals(batch, check_metadata=True)
    validate(copy, verdicts=False)
    for name in ("response_ids", "behavior_logprobs"):
        values, _ = tokens(copy, name)
        shared = [np.shares_memory(values, np.frombuffer(r, np.uint8)) for r in raw if r.nbytes]
        assert values.size == 0 or any(shared)


def test_arrow_ipc_keeps_everything() -> None:
    batch = full_batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (copy,) = list(pa.ipc.open_stream(sink.getvalue()))
    validate(copy, verdicts=True)
    assert copy.equals(batch, check_metadata=True)


def test_additional_columns_are_let_through() -> None:
    batch = rollout_batch(three_samples(), META)
    validate(batch.append_column("turns", pa.array([1, 2, 3])), verdicts=False)


def test_unknown_format_version() -> None:
    batch = full_batch()
    key = b"slipstream.format_version"
    newer = {**batch.schema.metadata, key: str(FORMAT_VERSION + 1)}
    error = refusal(lambda: validate(batch.replace_schema_metadata(newer), verdicts=True))
    assert f"the batch has {FORMAT_VERSION + 1}" in error.rule
    error = refusal(lambda: validate(batch.replace_schema_metadata(None), verdicts=True))
    assert "the batch has none" in error.rule
    verdicts = verdict_batch(three_verdicts()).replace_schema_metadata({key: "0"})
    rollouts = rollout_batch(three_samples(), META)
    assert "the batch has 0" in refusal(lambda: with_verdicts(rollouts, verdicts)).rule


@pytest.mark.parametrize("key", ["tokenizer", "model", "lineage"])
def test_missing_metadata(key: str) -> None:
    batch = full_batch()
    left = {k: v for k, v in batch.schema.metadata.items() if k != f"slipstream.{key}".encode()}
    error = refusal(lambda: read_meta(batch.replace_schema_metadata(left)))
    assert key in error.rule and "missing" in error.rule


@pytest.mark.parametrize("name", ROLLOUT_SCHEMA.names + VERDICT_SCHEMA.names)
def test_missing_column(name: str) -> None:
    batch = full_batch().drop_columns([name])
    error = refusal(lambda: validate(batch, verdicts=True))
    assert (error.column, error.rule) == (name, "column is missing")


@pytest.mark.parametrize("name", ROLLOUT_SCHEMA.names + VERDICT_SCHEMA.names)
def test_mistyped_column(name: str) -> None:
    batch = replaced(full_batch(), name, pa.array([b"", b"", b""], pa.binary()))
    error = refusal(lambda: validate(batch, verdicts=True))
    assert error.column == name
    assert "type binary" in error.rule and str(full_batch().schema.field(name).type) in error.rule


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("response_ids", pa.list_(pa.int64())),
        ("behavior_logprobs", pa.list_(pa.float64())),
        ("response_ids", pa.large_list(pa.int32())),
        ("temperature", pa.float64()),
    ],
)
def test_neighbouring_type_is_not_the_type(name: str, other: pa.DataType) -> None:
    batch = full_batch()
    batch = replaced(batch, name, batch.column(name).cast(other))
    assert refusal(lambda: validate(batch, verdicts=True)).column == name


REQUIRED = [f.name for f in (*ROLLOUT_SCHEMA, *VERDICT_SCHEMA) if not f.nullable]


@pytest.mark.parametrize("name", REQUIRED)
def test_null_value(name: str) -> None:
    batch = full_batch()
    values = batch.column(name).to_pylist()
    batch = replaced(batch, name, [values[0], None, values[2]])
    error = refusal(lambda: validate(batch, verdicts=True))
    assert (error.column, error.rule) == (name, "value is null")
    assert error.sample == ("(row 1)" if name == "sample_id" else "7-0-1")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("prompt_ids", [1, None]),
        ("response_ids", [1, None, 2, 3]),
        ("behavior_logprobs", [-1.0, None, -1.0, -1.0]),
        ("loss_mask", [True, None, True, True]),
        ("version_spans", [{"version": None, "start": 0, "end": 4}]),
        ("version_spans", [None, {"version": 3, "start": 0, "end": 4}]),
        ("parts", [("answer", None)]),
    ],
)
def test_null_item_in_a_list(name: str, row: list) -> None:
    batch = full_batch()
    values = batch.column(name).to_pylist()
    batch = replaced(batch, name, [values[0], row, values[2]])
    error = refusal(lambda: validate(batch, verdicts=True))
    assert (error.sample, error.column) == ("7-0-1", name)
    assert "null" in error.rule


@pytest.mark.parametrize("name", ["behavior_logprobs", "loss_mask"])
@untimed
@given(data=st.data())
def test_ragged_lists(name: str, data: st.DataObject) -> None:
    rows = data.draw(sample_lists(min_size=1))
    batch = rollout_batch(rows, META)
    victim = data.draw(st.integers(0, len(rows) - 1))
    values = batch.column(name).to_pylist()
    wrong = data.draw(st.integers(0, 12).filter(lambda n: n != len(values[victim])))
    values[victim] = [False if name == "loss_mask" else 0.0] * wrong
    error = refusal(lambda: validate(replaced(batch, name, values), verdicts=False))
    assert (error.sample, error.column) == (rows[victim].sample_id, name)
    assert "ragged" in error.rule and f"got {wrong}" in error.rule


def tiles(spans: list[tuple[int, int]], length: int) -> bool:
    """Reference: the spans, in order, cover each of `length` positions once."""
    covered = [position for start, end in spans for position in range(start, end)]
    return covered == list(range(length)) and all(start < end for start, end in spans)


@settings(untimed, max_examples=100)
@given(data=st.data())
def test_spans_are_accepted_exactly_when_they_tile(data: st.DataObject) -> None:
    rows = data.draw(sample_lists(min_size=1))
    victim = data.draw(st.integers(0, len(rows) - 1))
    length = len(rows[victim].response_ids)
    edge = st.integers(0, length + 1)
    valid = [(s.start, s.end) for s in rows[victim].version_spans]
    spans = data.draw(st.just(valid) | st.lists(st.tuples(edge, edge), max_size=3))
    batch = rollout_batch(rows, META)
    values = batch.column("version_spans").to_pylist()
    values[victim] = [{"version": 1, "start": start, "end": end} for start, end in spans]
    batch = replaced(batch, "version_spans", values)
    if tiles(spans, length):
        validate(batch, verdicts=False)
        return
    error = refusal(lambda: validate(batch, verdicts=False))
    assert (error.sample, error.column) == (rows[victim].sample_id, "version_spans")
    assert "span" in error.rule


@untimed
@given(data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_logprobs_that_are_not_finite(data: st.DataObject, bad: float) -> None:
    rows = data.draw(sample_lists(min_size=1).filter(lambda r: any(len(s.loss_mask) for s in r)))
    victim = data.draw(st.sampled_from([s.sample_index for s in rows if len(s.loss_mask)]))
    position = data.draw(st.integers(0, len(rows[victim].loss_mask) - 1))
    logprobs = list(rows[victim].behavior_logprobs)
    logprobs[position] = bad
    rows[victim] = replace(rows[victim], behavior_logprobs=logprobs)
    error = refusal(lambda: rollout_batch(rows, META))
    assert (error.sample, error.column) == (rows[victim].sample_id, "behavior_logprobs")
    assert "finite" in error.rule and f"got {bad} at position {position}" in error.rule


def test_logprobs_are_zero_at_tool_tokens() -> None:
    rows = three_samples()
    rows[1] = replace(rows[1], loss_mask=[True, False, True, True])
    error = refusal(lambda: rollout_batch(rows, META))
    assert (error.sample, error.column) == ("7-0-1", "behavior_logprobs")
    assert "0.0 where the loss mask is false" in error.rule and "position 1" in error.rule
    rollout_batch([rows[0], replace(rows[1], behavior_logprobs=[-1.0, 0.0, -1.0, -1.0])], META)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("sample_id", "7-0-0", "unique"),
        ("sample_id", 12, "expected string, got 12"),
        ("prompt_ids", [1, -2], "[0, 2147483647], got -2"),
        ("response_ids", [0, 1, 2, 2**31], "[0, 2147483647]"),
        ("response_ids", [0.0, 1.0, 2.0, 3.0], "float64"),
        ("response_ids", [[0], [1], [2], [3]], "2 dimensions"),
        ("loss_mask", [1, 1, 1, 1], "flat list of bool"),
        ("version_spans", [VersionSpan(-1, 0, 4)], "not negative, got -1"),
        ("version_spans", [VersionSpan("3", 0, 4)], "expected int64, got '3'"),
        ("attempt", -1, "not negative, got -1"),
        ("sample_index", 2**31, "expected int32"),
        ("finish_reason", "abort", "one of stop, length, got abort"),
        ("started_at", float("nan"), "finite"),
        ("finished_at", float("inf"), "finite"),
        ("temperature", 0.0, "above 0, got 0.0"),
        ("temperature", float("nan"), "finite"),
        ("seed", 2**63, "expected int64"),
    ],
)
def test_value_out_of_bounds(name: str, value: object, rule: str) -> None:
    rows = three_samples()
    rows[1] = replace(rows[1], **{name: value})
    error = refusal(lambda: rollout_batch(rows, META))
    assert error.column == name and rule in error.rule
    if name != "sample_id":
        assert error.sample == "7-0-1"


def test_negative_token_ids_in_a_batch_from_elsewhere() -> None:
    batch = replaced(full_batch(), "response_ids", [[0, 1], [0, 1, -7, 3], []])
    error = refusal(lambda: validate(batch, verdicts=True))
    assert (error.sample, error.column) == ("7-0-1", "response_ids")
    assert "got -7 at position 2" in error.rule


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("reward", None, "finite where the status is ok"),
        ("reward", float("nan"), "finite where the status is ok"),
        ("reward", float("inf"), "finite where the status is ok"),
        ("reward", "good", "expected double"),
        ("outcome", float("nan"), "null or finite"),
        ("status", "fine", "one of ok, unscorable, error, timeout, got fine"),
        ("status", "error", "null where the status is not ok"),
        ("parts", {"answer": float("nan")}, "finite"),
        ("verify_s", -1.0, "not negative"),
        ("verify_s", float("nan"), "finite"),
    ],
)
def test_bad_verdict(name: str, value: object, rule: str) -> None:
    rows = three_verdicts()
    rows[2] = replace(rows[2], **{name: value})
    error = refusal(lambda: verdict_batch(rows))
    assert error.sample == "7-0-2" and rule in error.rule
    assert error.column == ("reward" if "null where" in rule else name)


def test_verdicts_cover_the_same_samples() -> None:
    rollouts, rows = rollout_batch(three_samples(), META), three_verdicts()
    error = refusal(lambda: with_verdicts(rollouts, verdict_batch(rows[:2])))
    assert (error.sample, error.rule) == ("7-0-2", "has no verdict")
    stranger = VerdictRow("8-0-0", 1.0, None, "ok")
    error = refusal(lambda: with_verdicts(rollouts, verdict_batch([*rows, stranger])))
    assert (error.sample, error.rule) == ("8-0-0", "has a verdict but no rollout")
    error = refusal(lambda: verdict_batch([rows[0], rows[0]]))
    assert "unique" in error.rule


def test_verdicts_are_given_once() -> None:
    error = refusal(lambda: with_verdicts(full_batch(), verdict_batch(three_verdicts())))
    assert error.column == "reward" and "already" in error.rule


def test_status_values_come_from_the_enum() -> None:
    rows = [VerdictRow(str(s), 1.0 if s == "ok" else None, None, s) for s in VerdictStatus]
    assert verdict_batch(rows).column("status").to_pylist() == list(VerdictStatus)


def test_error_survives_pickling() -> None:
    error = TrajectoryError("7-0-1", "reward", "reward is finite")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.sample, copy.column, copy.rule) == ("7-0-1", "reward", "reward is finite")
    assert str(copy) == str(error)


@untimed
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_weight_label_round_trip(lineage: int, version: int) -> None:
    label = WeightLabel(lineage, version)
    assert WeightLabel.parse(str(label)) == label


@pytest.mark.parametrize("text", ["", "12", "0.", ".1", "0.1.2", "-1.0", "0.x", "0. 1", "default"])
def test_weight_label_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"LINEAGE\.VERSION"):
        WeightLabel.parse(text)


def test_weight_labels_order_by_lineage_first() -> None:
    assert WeightLabel(0, 12) < WeightLabel(1, 2) < WeightLabel(1, 10)


def test_sample_ids_differ_by_attempt() -> None:
    ids = {sample_id(g, a, i) for g in (1, 11) for a in (0, 1) for i in (0, 1)}
    assert len(ids) == 8 and sample_id(7, 0, 2) == "7-0-2"


def test_imports_without_the_heavy_packages() -> None:
    code = (
        "import sys, actors.trajectory;"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
