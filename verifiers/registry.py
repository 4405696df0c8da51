"""Names verifiers and finds them. Knows nothing of processes, tokens or batches.

A verifier is a function of at most a few lines, or a class whose instances are called:

    @verifier("ends_with", isolated=False)
    def ends_with(question: Question, completion: str) -> float:
        return completion.strip().endswith(question.answer)

It returns a number, a `Verdict`, or, where the decorator declares `weights`, a mapping of named
parts; it may be `async`. Anything else, an exception included, becomes an error verdict. A class
is built once per process, before its first completion and outside the deadline: the place to
load what is slow to import.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

BUILT_IN = {
    "exact": "verifiers.exact",
    "math": "verifiers.math_answers",
    "numeric": "verifiers.numeric",
    "reasoning_gym": "verifiers.reasoning_gym_tasks",
}
_ATTRIBUTE = "__slipstream_verifier__"
_registered: dict[str, "Verifier"] = {}
Target = TypeVar("Target", bound=Callable[..., Any])


class UnknownVerifierError(ValueError):
    """No verifier has this name, or the import path does not lead to one."""


@dataclass(frozen=True)
class Verifier:
    """A registered verifier and what it promises.

    `path` is the `pkg.module:Name` under which another process finds it. `isolated` verifiers run
    in a process that can be killed; only one that can neither hang nor crash does without.
    `per_group` verifiers get the list of a group's completions and return as many results.
    Rewards outside `reward_range` are errors. `weights` gives the parts that must be returned,
    and the reward as their weighted sum.
    """

    name: str
    path: str
    target: Callable[..., Any]
    isolated: bool = True
    per_group: bool = False
    reward_range: tuple[float, float] = (0.0, 1.0)
    weights: Mapping[str, float] | None = None

    @cached_property
    def call(self) -> Callable[..., Any]:
        """What is called with (question, completion); builds a class on first use."""
        built: Any = self.target() if inspect.isclass(self.target) else self.target
        return built


def verifier(
    name: str,
    *,
    isolated: bool = True,
    per_group: bool = False,
    reward_range: tuple[float, float] = (0.0, 1.0),
    weights: Mapping[str, float] | None = None,
) -> Callable[[Target], Target]:
    """Register the decorated function or class, unchanged, under `name` (see `Verifier`).

    Raises ValueError when another verifier has the name or the range is empty.
    """
    if not reward_range[0] < reward_range[1]:
        raise ValueError(f"verifier {name!r}: reward_range {reward_range} is empty")

    def register(target: Target) -> Target:
        path = f"{target.__module__}:{target.__qualname__}"
        known = _registered.get(name)
        if known is not None and known.path != path:
            raise ValueError(f"verifier {name!r} is {known.path} already; {path} needs a new name")
        entry = Verifier(name, path, target, isolated, per_group, reward_range, weights)
        _registered[name] = entry
        setattr(target, _ATTRIBUTE, entry)
        return target

    return register


def resolve(name: str) -> Verifier:
    """The verifier of that name, or at that import path `pkg.module:Name`.

    An undecorated function or class is taken as an isolated, per-sample verifier with rewards in
    [0, 1]. Raises UnknownVerifierError, with the nearest name, when there is none.
    """
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return _imported(name)
    known = sorted({*BUILT_IN, *_registered})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    raise UnknownVerifierError(
        f"no verifier is named {name!r}; {hint} (or give an import path, pkg.module:Name)"
    )


def _imported(path: str) -> Verifier:
    module_name, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for step in attribute.split("."):
            target = getattr(target, step)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownVerifierError(f"verifier {path!r} cannot be imported: {error}") from error
    if not callable(target):
        raise UnknownVerifierError(f"verifier {path!r} is a {type(target).__name__}, not callable")
    return getattr(target, _ATTRIBUTE, None) or Verifier(path, path, target)
