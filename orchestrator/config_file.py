"""Reading a configuration: TOML file, dotted overrides, and errors a user can act on.

Knows the models only through their fields; the rules are theirs.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config import RunConfig
from orchestrator.config_types import tables, wrong_kinds
from orchestrator.errors import ConfigError, Problem, UsageError


def load(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Read the TOML file (or a run's config.json) at `path` and put `overrides` over it.

    `overrides` are pairs of dotted key and text, the text read as a TOML value where it is one.
    Relative paths, those of overrides too, count from the file's folder. Raises ConfigError with
    every problem found, UsageError when there is no such file.
    """
    raw = read(path, overrides)
    problems = list(wrong_kinds(raw, RunConfig))
    try:
        config = RunConfig.model_validate(raw, context={"folder": path.resolve().parent})
    except ValidationError as error:
        known = {problem.key for problem in problems}
        others = (problem for problem in _problems(error, raw) if problem.key not in known)
        raise ConfigError(str(path), [*problems, *others]) from None
    if problems:
        raise ConfigError(str(path), problems)
    return config.resolved()


def read(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """What stands in the file with `overrides` put over it, not judged; errors as of `load`."""
    raw = _read(path)
    for key, text in overrides:
        _set(raw, key, parse_value(text))
    return raw


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration {path}: {error.strerror}; expected a TOML file, "
            "such as deploy/quickstart/quickstart.toml."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), [Problem("", "not UTF-8 text", "a TOML file")]) from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        kind = path.suffix.removeprefix(".").upper() or "TOML"
        raise ConfigError(str(path), [Problem("", f"syntax error, {error}", f"{kind}")]) from None
    if not isinstance(raw, dict):
        raise ConfigError(str(path), [Problem("", _shown(raw), "a table of keys")])
    return raw


def parse_value(text: str) -> Any:
    """The TOML value that `text` is, or `text` itself: `3`, `1e-4`, `true`, `[1, 2]`, `dapo`."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) != 1 or isinstance(parsed["value"], date | datetime | time):
        return text
    return parsed["value"]


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted `key`, making tables on the way; list items go by number."""
    *parents, last = key.split(".")
    here: Any = raw
    for depth, part in enumerate(parents):
        if isinstance(here, dict):
            here = here.setdefault(part, {})
        elif isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        if not isinstance(here, dict | list):
            at = ".".join(parents[: depth + 1])
            raise UsageError(f"--{key}: {at} is {_shown(here)}, a value and not a table of keys.")
    if isinstance(here, dict):
        here[last] = value
    elif last.isdecimal() and int(last) < len(here):
        here[int(last)] = value
    else:
        raise UsageError(f"--{key}: {'.'.join(parents)} is a list of {len(here)}; name an item.")


def _problems(error: ValidationError, raw: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        nested = detail.get("ctx", {}).get("problems")
        problems.extend(nested if nested is not None else [_problem(detail, raw)])
    return problems


def _problem(detail: ErrorDetails, raw: dict[str, Any]) -> Problem:
    path = _as_written(detail["loc"], raw)
    key = ".".join(path)
    message = detail["msg"].removeprefix("Value error, ")
    match detail["type"]:
        case "extra_forbidden":
            siblings = _fields_at(detail["loc"][:-1])
            hint = _nearest(path, siblings)
            expected = "" if hint else _expected_keys(siblings)
            return Problem(key, "unknown key", expected, hint)
        case "missing":
            return Problem(key, "missing", "a value, for it has no default")
        case "value_error":
            return Problem(key, message)
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(key, _shown(detail["input"]), "a table of keys")
    expected = message[:1].lower() + message[1:]
    expected = expected.removeprefix("input should be ").rstrip(".")
    return Problem(key, _shown(detail["input"]), expected)


def _as_written(loc: Sequence[int | str], raw: Any) -> list[str]:
    """`loc` in the words of the file: pydantic adds union tags, and indices of implied lists."""
    path: list[str] = []
    here = raw
    for position, part in enumerate(loc):
        if (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]  # type: ignore[index]
            path.append(str(part))
        elif position == len(loc) - 1 and isinstance(here, dict):
            path.append(str(part))
    return path


def _shown(value: Any) -> str:
    """`value` as short text, in TOML's spelling where that differs from Python's."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields_at(loc: Sequence[int | str]) -> list[str]:
    """Field names of the table that `loc` leads to; union tags choose nothing and are skipped."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in loc:
        inner = [m for model in models for m in _tables(model.model_fields, part)]
        models = inner or models
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _tables(fields: dict[str, Any], name: int | str) -> list[type[BaseModel]]:
    field = fields.get(str(name))
    return list(tables(field.annotation)) if field is not None else []


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, tables included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in tables(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")


def _expected_keys(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}" if names else "no key here"


def _nearest(path: Sequence[str], siblings: Sequence[str]) -> str:
    """`Did you mean …?`: a sibling that looks like it, else the same name in another table."""
    *table, name = path
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {'.'.join([*table, close[0]])}?"
    everywhere = list(dict.fromkeys(known_keys()))
    same = [key for key in everywhere if key.rsplit(".", 1)[-1] == name]
    close = same or difflib.get_close_matches(".".join(path), everywhere, n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""
