"""Values of the wrong kind in a configuration: text for a number, a number for a truth value.

pydantic reads "40" as 40 and true as 1, which hides a slip; a file has types of its own, and they
must be the right ones. Knows the models only through their fields.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from orchestrator.errors import Problem

_WORDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"))


def wrong_kinds(
    raw: Mapping[str, Any], model: type[BaseModel], prefix: str = ""
) -> Iterator[Problem]:
    """One problem per value in `raw` whose kind its field in `model` does not take."""
    for name, field in model.model_fields.items():
        if name in raw:
            yield from _wrong(raw[name], set(kinds(field.annotation)), prefix + name)


def _wrong(value: Any, accepted: set[Any], key: str) -> Iterator[Problem]:
    """Problems of the value at `key`, whose field takes any of `accepted`."""
    models = [kind for kind in accepted if _is_model(kind)]
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _wrong(item, accepted, f"{key}.{index}")
    elif isinstance(value, dict) and models:
        # Of several tables that may stand here, the one that knows most of the keys is meant.
        meant = max(models, key=lambda model: len(value.keys() & model.model_fields.keys()))
        yield from wrong_kinds(value, meant, f"{key}.")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _wrong(item, accepted - {dict}, f"{key}.{name}")
    elif isinstance(value, bool | int | float | str) and not models and not _takes(accepted, value):
        words = [words for kind, words in _WORDS if kind in accepted]
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        yield Problem(key, shown, " or ".join(words))


def _takes(accepted: set[Any], value: bool | int | float | str) -> bool:
    if accepted - {bool, int, float, type(None)}:
        return True  # text and whatever is made of it: pydantic says what is wrong
    if isinstance(value, bool):
        return bool in accepted
    if isinstance(value, str):
        return False
    return int in accepted or float in accepted


def kinds(annotation: Any) -> Iterator[Any]:
    """Plain types in an annotation, through unions, containers and Annotated; of a mapping those
    of its values."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin in (dict, Mapping):
        yield from kinds(get_args(annotation)[1])
        yield dict
    elif origin is None:
        yield annotation
    else:
        arguments = get_args(annotation)
        inner = arguments[:1] if hasattr(annotation, "__metadata__") else arguments
        for argument in inner:
            if argument is not Ellipsis:
                yield from kinds(argument)


def tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models named anywhere in a type annotation, through unions, tuples and Annotated."""
    if _is_model(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from tables(argument)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
