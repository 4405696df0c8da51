"""Tasks from files and families: conventions, refusals that name the row, tokenisation."""

import gzip
import json
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data import merge, read_file
from orchestrator.data_errors import BadRow, DataError
from orchestrator.tasks import TaskRow

ASK = [{"role": "user", "content": "What is 2+2?"}]


def jsonl(folder: Path, *rows, name="tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def parquet(folder: Path, rows: list[dict], name="train.parquet") -> Path:
    path = folder / name
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def one(folder: Path, row: dict, **options) -> TaskRow:
    return read_file(jsonl(folder, row), **{"verifier": "exact", **options})[0]


def refusal(folder: Path, row: dict, **options) -> BadRow:
    """The one problem of the second of two rows, the first being fine."""
    path = jsonl(folder, {"prompt": "p", "answer": "a"}, row)
    with pytest.raises(DataError) as caught:
        read_file(path, **{"verifier": "exact", **options})
    (problem,) = caught.value.problems
    assert (problem.source, problem.row) == (str(path), 2)
    assert str(problem) in str(caught.value)
    return problem


# Conventions


def test_our_own_names(tmp_path):
    row = {
        "prompt": "1+1=",
        "answer": "2",
        "verifier": "numeric",
        "id": "t-1",
        "source": "sums",
        "extra": {"level": 3},
        "note": "easy",
    }
    expected = TaskRow("t-1", "1+1=", "2", "numeric", "sums", {"level": 3, "note": "easy"})
    assert one(tmp_path, row) == expected
    assert read_file(parquet(tmp_path, [row])) == [expected]


def test_verls_files_are_understood_without_configuration(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": ASK,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": i, "answer": "2+2 #### 4"},
        }
        for i in range(2)
    ]
    first, second = read_file(parquet(tmp_path, rows), verifier="numeric")
    assert first.prompt == tuple(ASK)
    assert (first.answer, first.source, first.verifier) == ("4", "openai/gsm8k", "numeric")
    assert first.extra == {
        "split": "train",
        "index": 0,
        "answer": "2+2 #### 4",
        "ability": "math",
        "reward_model": {"style": "rule"},
    }
    assert first.task_id != second.task_id


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": ASK, "completion": [{"role": "assistant", "content": "4"}]}, "4"),
        ({"prompt": ASK, "completion": "4"}, "4"),
        ({"prompt": ASK, "solution": "$4$"}, "$4$"),
        ({"prompt": ASK, "ground_truth": "4"}, "4"),
        ({"prompt": ASK, "answer": "4", "solution": "long"}, "4"),
        ({"messages": [*ASK, {"role": "assistant", "content": "4"}]}, "4"),
        ({"messages": ASK, "answer": "4"}, "4"),
        ({"messages": [*ASK, {"role": "assistant", "content": "?"}], "answer": "4"}, "4"),
        ({"prompt": ASK}, None),
    ],
)
def test_trls_files_are_understood_without_configuration(tmp_path, row, answer):
    for task in (one(tmp_path, row), read_file(parquet(tmp_path, [row]), verifier="math")[0]):
        assert task.prompt == tuple(ASK)
        assert task.answer == answer


def test_columns_are_mapped_into_structs_and_beat_the_usual_names(tmp_path):
    row = {"prompt": "not this", "meta": {"q": "1+1=", "gold": 2}, "answer": "nor this"}
    columns = {"prompt": "meta.q", "answer": "meta.gold"}
    task = one(tmp_path, row, columns=columns)
    assert (task.prompt, task.answer) == ("1+1=", "2")
    assert task.extra == {"prompt": "not this", "answer": "nor this", "meta": {}}


def test_a_column_whose_name_has_a_dot_is_no_struct(tmp_path):
    task = one(tmp_path, {"a.b": "1+1=", "a": {"b": "x"}}, columns={"prompt": "a.b"})
    assert (task.prompt, task.extra) == ("1+1=", {"a": {"b": "x"}})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "prompt"}, "no field 'promt', did you mean 'prompt'"),
        ({"prompt": "questoin"}, "no column 'questoin' for `prompt`, did you mean 'question'"),
    ],
)
def test_a_column_map_that_fits_nothing_is_refused_with_the_nearest_name(
    tmp_path, columns, message
):
    with pytest.raises(DataError, match=message):
        read_file(jsonl(tmp_path, {"question": "q"}), columns=columns, verifier="exact")


@pytest.mark.parametrize(
    ("cell", "answer"), [(4, "4"), (2.5, "2.5"), (True, "True"), ("", ""), ("2024-01-01",) * 2]
)
def test_answers_become_text(tmp_path, cell, answer):
    assert one(tmp_path, {"prompt": "p", "answer": cell}).answer == answer


def test_a_structured_answer_stays_in_extra_for_a_custom_verifier(tmp_path):
    row = {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}}}
    task = one(tmp_path, row)
    assert task.answer is None
    assert task.extra == {"reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}}}


def test_rows_without_an_id_are_called_after_file_and_row(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p"}, "", {"prompt": "q"})
    tasks = read_file(path, verifier="exact")
    folder = tmp_path.name
    assert [t.task_id for t in tasks] == [f"{folder}/tasks.jsonl:1", f"{folder}/tasks.jsonl:3"]
    assert {t.source for t in tasks} == {"tasks"}


def test_numbers_are_fine_as_ids_and_the_rows_verifier_beats_the_default(tmp_path):
    task = one(tmp_path, {"prompt": "p", "id": 17, "verifier": "math"})
    assert (task.task_id, task.verifier) == ("17", "math")


def test_text_parts_of_a_message_are_joined_and_null_keys_left_out(tmp_path):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    prompt = [{"role": "user", "content": parts, "name": None}]
    assert one(tmp_path, {"prompt": prompt}).prompt == ({"role": "user", "content": "2+2"},)


def test_extra_is_json_whatever_the_parquet_file_held(tmp_path):
    row = {"prompt": "p", "day": date(2024, 5, 1), "score": float("nan"), "tags": ["a", "b"]}
    (task,) = read_file(parquet(tmp_path, [row]), verifier="exact")
    assert task.extra == {"day": "2024-05-01", "score": None, "tags": ["a", "b"]}


def test_compressed_json_lines_are_read(tmp_path):
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p\\u2028q"}\n'))
    assert read_file(path, verifier="exact")[0].prompt == "p\u2028q"


# Refusals


@pytest.mark.parametrize(
    ("row", "column", "expected", "found"),
    [
        ({"answer": "a"}, "prompt", "text or a list of messages", "nothing"),
        ({"prompt": "  ", "answer": "a"}, "prompt", "a prompt", "empty text"),
        ({"prompt": 7, "answer": "a"}, "prompt", "text or a list of messages", "int 7"),
        ({"prompt": [], "answer": "a"}, "prompt", "text or a list of messages", "list []"),
        ({"prompt": ["hi"], "answer": "a"}, "prompt[0]", "a message with role", "str 'hi'"),
        ({"prompt": [{"content": "x"}], "answer": "a"}, "prompt[0].role", "a role", "nothing"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "prompt[0].content", "text", "nothing"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a"},
            "prompt[0].content",
            "parts of type text",
            "dict {'type': 'image'}",
        ),
        (
            {"prompt": [*ASK, {"role": "assistant", "content": "4"}], "answer": "a"},
            "prompt",
            "a last message that asks",
            "one of the assistant",
        ),
        ({"prompt": "p"}, "answer", "a reference answer", "nothing"),
        ({"prompt": "p", "answer": float("nan")}, "answer", "a reference answer", "float nan"),
        ({"prompt": "p", "answer": "a", "id": 1.5}, "id", "text or a whole number", "float 1.5"),
        ({"prompt": "p", "answer": "a", "verifier": 3}, "verifier", "the name of", "int 3"),
        ({"prompt": "p", "answer": "a", "extra": "x"}, "extra", "a struct", "str 'x'"),
        (
            {"prompt": "p", "answer": "a", "extra": {"k": 1}, "k": 2},
            "k",
            "the same value as in `extra.k`",
            "int 2",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_column_and_what_was_expected(
    tmp_path, row, column, expected, found
):
    problem = refusal(tmp_path, row)
    assert problem.column == column
    assert expected in problem.expected
    assert problem.found == found


def test_without_a_verifier_anywhere_the_row_is_refused(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "verifier": "exact"}, {"prompt": "p"})
    with pytest.raises(DataError, match="row 2, column `verifier`: expected the name of a verif"):
        read_file(path)


def test_bytes_have_no_place_in_a_task(tmp_path):
    path = parquet(tmp_path, [{"prompt": "p", "image": b"\x89PNG"}])
    with pytest.raises(DataError, match=r"row 1, column `image`: .* JSON form, found bytes"):
        read_file(path, verifier="exact")


def test_lines_that_are_no_object_are_named_with_every_other_bad_row(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p"}, "{broken", "", "[1]", {"prompt": ""})
    with pytest.raises(DataError) as caught:
        read_file(path, verifier="exact")
    assert [problem.row for problem in caught.value.problems] == [2, 4, 5]
    assert caught.value.exit_code == 2


def test_many_bad_rows_are_all_kept_but_not_all_shown(tmp_path):
    path = jsonl(tmp_path, *({"prompt": ""} for _ in range(25)))
    with pytest.raises(DataError, match="and 15 more bad rows") as caught:
        read_file(path, verifier="exact")
    assert len(caught.value.problems) == 25


def test_duplicate_ids_are_refused_in_a_file_and_between_sources(tmp_path):
    rows = [{"prompt": "p", "id": name} for name in ("a", "b", "a")]
    with pytest.raises(DataError, match="expected ids that differ, found 'a' 2 times"):
        read_file(jsonl(tmp_path, *rows), verifier="exact")
    once = read_file(jsonl(tmp_path, rows[0]), verifier="exact")
    with pytest.raises(DataError, match="all sources together"):
        merge([once, once])
    assert merge([once, read_file(jsonl(tmp_path, rows[1]), verifier="exact")])[1].task_id == "b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tasks.jsonl", "\n\n", "at least one row"),
        ("tasks.csv", "prompt\n", r"a name ending in .parquet"),
        ("tasks.json", '[{"prompt": "p"}]', "one JSON object a line, found a JSON array"),
        ("tasks.parquet", "no parquet", "a readable file, found ArrowInvalid"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_file(path, verifier="exact")
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: expected a readable file, found FileNot"):
        read_file(tmp_path / "nowhere.jsonl")
