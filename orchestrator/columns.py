"""Column conventions: which of a file's columns is the prompt, the answer, the verifier and so on.

Understands verl's files (data_source, prompt, ability, reward_model.ground_truth, extra_info) and
TRL's (prompt, messages, completion, answer, solution, ground_truth) by their names; a `columns`
map says what names do not. Knows rows as dicts, no file format.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import StrEnum
from typing import Any

from orchestrator.data_errors import CellError, describe
from orchestrator.tasks import Message, Prompt, TaskRow


class Field(StrEnum):
    """What a task is made of."""

    PROMPT = "prompt"
    ANSWER = "answer"
    VERIFIER = "verifier"
    ID = "id"
    SOURCE = "source"
    EXTRA = "extra"


USUAL_NAMES: Mapping[Field, tuple[str, ...]] = {
    Field.PROMPT: ("prompt", "messages", "question", "problem"),
    Field.ANSWER: (
        "answer",
        "ground_truth",
        "reward_model.ground_truth",
        "solution",
        "completion",
    ),
    Field.VERIFIER: ("verifier",),
    Field.ID: ("id", "task_id"),
    Field.SOURCE: ("source", "data_source"),
    Field.EXTRA: ("extra", "extra_info"),
}
"""Names looked for, the first that a file has wins. A dot leads into a struct."""


class ColumnsError(ValueError):
    """The `columns` map names a field of ours or a column of the file that does not exist."""


@dataclass(frozen=True)
class Layout:
    """Which column of a file plays which part."""

    column: Mapping[Field, str]
    """Fields that the file has."""

    def get(self, row: Mapping[str, Any], field: Field) -> Any:
        """The field's cell in this row, None if there is none."""
        name = self.column.get(field)
        return None if name is None else _lookup(row, name)

    def rest(self, row: Mapping[str, Any], *, keep: Field | None = None) -> dict[str, Any]:
        """The row without the cells that are a field, other than `keep`."""
        rest = dict(row)
        for field, name in self.column.items():
            if field is keep:
                continue
            if name in rest:
                del rest[name]
                continue
            head, _, tail = name.partition(".")
            if isinstance(rest.get(head), Mapping):
                rest[head] = {k: v for k, v in rest[head].items() if k != tail}
        return rest


def layout(names: Iterable[str], columns: Mapping[str, str]) -> Layout:
    """Find the fields among a file's column names, struct members as `column.member`.

    columns: our field → the file's column, stronger than the usual names. Raises ColumnsError.
    """
    available = set(names)
    for key in columns:
        if key not in set(Field):
            hint = _nearest(key, list(Field))
            raise ColumnsError(f"`columns` has no field {key!r}{hint}; fields: {', '.join(Field)}")
    chosen: dict[Field, str] = {}
    for field in Field:
        if field.value in columns:
            name = columns[field.value]
            if name not in available:
                hint = _nearest(name, sorted(available))
                raise ColumnsError(
                    f"there is no column {name!r} for `{field}`{hint}; "
                    f"columns: {', '.join(sorted(available))}"
                )
            chosen[field] = name
        elif usual := next((n for n in USUAL_NAMES[field] if n in available), None):
            chosen[field] = usual
    return Layout(chosen)


def task_row(
    row: Mapping[str, Any],
    layout: Layout,
    *,
    task_id: str,
    source: str,
    verifier: str | None,
) -> TaskRow:
    """A task of one row; id, source and verifier stand in where the row has none.

    A structured answer, which only a custom verifier can read, stays in `extra` under its own
    name and `answer` is None. Raises CellError naming the column.
    """
    column = {field: layout.column.get(field, field.value) for field in Field}
    prompt, reference = _prompt(layout.get(row, Field.PROMPT), column[Field.PROMPT])
    answer: str | None = reference
    structured = False
    if Field.ANSWER in layout.column:
        answer = _answer(layout.get(row, Field.ANSWER), column[Field.ANSWER])
        structured = answer is None
    return TaskRow(
        task_id=_label(layout.get(row, Field.ID), column[Field.ID]) or task_id,
        prompt=prompt,
        answer=answer,
        verifier=_verifier(layout.get(row, Field.VERIFIER), column[Field.VERIFIER], verifier),
        source=_label(layout.get(row, Field.SOURCE), column[Field.SOURCE]) or source,
        extra=_extra(row, layout, keep=Field.ANSWER if structured else None),
    )


def json_value(value: Any, column: str) -> Any:
    """The value as JSON: dates as ISO text, numbers that are not finite as null.

    Raises CellError for what has no JSON form, such as bytes.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else None
        case date() | datetime() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case Mapping():
            return {str(k): json_value(v, f"{column}.{k}") for k, v in value.items()}
        case list() | tuple():
            return [json_value(v, column) for v in value]
        case _:
            raise CellError(column, "a value with a JSON form", describe(value))


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """A cell by name; a name with a dot leads into structs unless a column is called that."""
    if name in row:
        return row[name]
    cell: Any = row
    for part in name.split("."):
        if not isinstance(cell, Mapping):
            return None
        cell = cell.get(part)
    return cell


def _nearest(name: str, names: list[str]) -> str:
    match = difflib.get_close_matches(name, names, n=1)
    return f", did you mean {str(match[0])!r}?" if match else ""


def _prompt(cell: Any, column: str) -> tuple[Prompt, str | None]:
    """The prompt, and the assistant's answer that a full conversation in `messages` ends with."""
    if isinstance(cell, str):
        if not cell.strip():
            raise CellError(column, "a prompt", "empty text")
        return cell, None
    if not isinstance(cell, list | tuple) or not cell:
        raise CellError(column, "text or a list of messages", describe(cell))
    messages = tuple(_message(item, index, column) for index, item in enumerate(cell))
    if messages[-1]["role"] != "assistant":
        return messages, None
    if column != "messages" or len(messages) == 1:
        raise CellError(column, "a last message that asks something", "one of the assistant")
    return messages[:-1], messages[-1]["content"]


def _message(item: Any, index: int, column: str) -> Message:
    where = f"{column}[{index}]"
    if not isinstance(item, Mapping):
        raise CellError(where, "a message with role and content", describe(item))
    message = {key: value for key, value in item.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise CellError(f"{where}.role", "a role such as `user`", describe(role))
    if isinstance(content, list | tuple):
        content = _joined_parts(content, where)
    if not isinstance(content, str):
        raise CellError(f"{where}.content", "text", describe(content))
    return {**json_value(message | {"content": ""}, where), "role": role, "content": content}


def _joined_parts(parts: list | tuple, where: str) -> str:
    """The text of a content given in parts; only text parts are understood."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise CellError(f"{where}.content", "text, or parts of type text", describe(part))
    return "".join(part["text"] for part in parts)


def _answer(cell: Any, column: str) -> str | None:
    """The answer as text, None for a structured one."""
    if isinstance(cell, list | tuple) and len(cell) == 1 and isinstance(cell[0], Mapping):
        cell = cell[0].get("content", cell)
    match cell:
        case str():
            return cell
        case bool() | int() | Decimal():
            return str(cell)
        case float() if math.isfinite(cell):
            return str(cell)
        case Mapping() | list() | tuple():
            return None
        case _:
            raise CellError(column, "a reference answer, text or number", describe(cell))


def _label(cell: Any, column: str) -> str | None:
    """An id or a source: text or a whole number."""
    match cell:
        case None:
            return None
        case str() if cell:
            return cell
        case int() if not isinstance(cell, bool):
            return str(cell)
        case _:
            raise CellError(column, "text or a whole number", describe(cell))


def _verifier(cell: Any, column: str, default: str | None) -> str:
    if isinstance(cell, str) and cell:
        return cell
    if cell is not None:
        raise CellError(column, "the name of a verifier", describe(cell))
    if default is None:
        raise CellError(
            column, "the name of a verifier, in the row or for the whole source", "none"
        )
    return default


def _extra(row: Mapping[str, Any], layout: Layout, *, keep: Field | None) -> dict[str, Any]:
    """The extra cell's members, and each column that is no field under its own name."""
    column = layout.column.get(Field.EXTRA, "extra")
    cell = layout.get(row, Field.EXTRA)
    if cell is not None and not isinstance(cell, Mapping):
        raise CellError(column, "a struct or an object", describe(cell))
    extra = json_value(dict(cell or {}), column)
    for name, value in layout.rest(row, keep=keep).items():
        value = json_value(value, name)
        if name in extra and extra[name] != value:
            raise CellError(name, f"the same value as in `{column}.{name}`", describe(value))
        extra[name] = value
    return extra
