"""The configuration reference as Markdown, made from the models: `python -m` prints it.

docs/configuration.md is its output; a test keeps the two equal.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.config import RunConfig
from orchestrator.config_types import kinds, tables

INTRODUCTION = """# Configuration reference

A run is one TOML file. Top-level keys come first; every other key lives in the table of its role.
Any key can be set on the command line by its dotted name (`--learner.optimizer.lr 1e-4`), in TOML's
spelling; a bare word is a string. Relative paths count from the file's folder. Unknown keys, values
of another kind and values out of bounds are refused, all of them at once, each with what would be
accepted. `slipstream check CONFIG` validates a file without starting anything.

This page is generated from the models (`make docs`).
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_table(RunConfig, "", {}), ""])


def _table(model: type[BaseModel], prefix: str, shown: dict[type, str]) -> Iterator[str]:
    """Markdown of one table, then of the tables inside it; `shown` are those told before."""
    name = prefix.removesuffix(".")
    if prefix:
        yield f"## `[{name}]`"
        yield ""
        yield _sentence(model.__doc__)
        yield ""
    if model in shown:
        yield f"The same keys as `[{shown[model]}]`."
        yield ""
        return
    shown[model] = name
    leaves = {n: f for n, f in model.model_fields.items() if not any(tables(f.annotation))}
    if leaves:
        yield "| key | kind | default | meaning |"
        yield "| --- | --- | --- | --- |"
        yield from (_row(prefix + leaf, field) for leaf, field in leaves.items())
        yield ""
    for inner, field in model.model_fields.items():
        for table in tables(field.annotation):
            yield from _table(table, f"{prefix}{inner}.", shown)


def _row(key: str, field: FieldInfo) -> str:
    cells = (f"`{key}`", _kind(field), _default(field), _sentence(field.description))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _kind(field: FieldInfo) -> str:
    """What may stand there, bounds included."""
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    found = list(kinds(field.annotation))
    literals = _literals(field.annotation)
    if literals:
        return ", ".join(f"`{value}`" for value in literals)
    if dict in found:
        return "table"
    words = [names.get(kind, "path" if kind is Path else "") for kind in found]
    shown = " or ".join(dict.fromkeys(word for word in words if word)) or "value"
    if get_origin(field.annotation) is tuple:
        shown = f"list of {shown}"
    bounds = [_bound(rule) for rule in field.metadata]
    return " ".join([shown, *(bound for bound in bounds if bound)])


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for inner in get_args(annotation) for value in _literals(inner)]


def _bound(rule: object) -> str:
    match rule:
        case Ge(ge=value):
            return f"≥ {value:,}"
        case Gt(gt=value):
            return f"> {value:,}"
        case Le(le=value):
            return f"≤ {value:,}"
        case Lt(lt=value):
            return f"< {value:,}"
        case MinLen(min_length=value) if value > 1:
            return f"at least {value}"
    return ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value, default=str)}`"


if __name__ == "__main__":
    print(reference(), end="")
