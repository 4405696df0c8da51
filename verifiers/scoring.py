"""Calls a verifier and checks what it returns: every way to misbehave becomes a status.

Runs in whichever process holds the verifier; deadlines on code that does not yield are the
pool's affair.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers.registry import Verifier
from verifiers.verdict import Question, Verdict, VerdictStatus, finite


def score_blocking(
    verifier: Verifier, question: Question, completions: Sequence[str]
) -> Iterator[list[Verdict]]:
    """Verdicts in the order of `completions`, yielded as they are known: one by one, or all at
    once for a per-group verifier. Never raises for what the verifier does."""
    for unit in _units(verifier, completions):
        start = time.perf_counter()
        try:
            result = verifier.call(question, _argument(verifier, unit))
            if inspect.isawaitable(result):
                result = asyncio.run(_finish(result))
        except (Exception, SystemExit) as error:
            yield _everywhere(_raised(verifier, error), unit, start)
        else:
            yield _checked(verifier, result, unit, start)


async def score_inline(
    verifier: Verifier, question: Question, completions: Sequence[str], deadline_s: float
) -> list[Verdict]:
    """Verdicts in order, computed in this event loop. Only `async` verifiers overlap, and only
    they can be stopped at the deadline (seconds for each call)."""

    async def one(unit: list[str]) -> list[Verdict]:
        start = time.perf_counter()
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                result = verifier.call(question, _argument(verifier, unit))
                if inspect.isawaitable(result):
                    result = await result
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                late = Verdict.failed(VerdictStatus.TIMEOUT, overrun(verifier, deadline_s))
                return _everywhere(late, unit, start)
            return _everywhere(_raised(verifier, error), unit, start)
        return _checked(verifier, result, unit, start)

    scored = await asyncio.gather(*(one(unit) for unit in _units(verifier, completions)))
    return [verdict for unit in scored for verdict in unit]


def overrun(verifier: Verifier, deadline_s: float) -> str:
    """The detail of a timeout."""
    return f"verifier {verifier.name!r} did not answer within {deadline_s:g} s"


def check(verifier: Verifier, result: Any) -> Verdict:
    """`result` of one completion as a verdict; error where its type or value is not allowed."""
    try:
        verdict = _verdict(verifier, result)
    except (TypeError, ValueError) as error:
        detail = f"verifier {verifier.name!r} returned a wrong result: {error}"
        return Verdict.failed(VerdictStatus.ERROR, detail)
    low, high = verifier.reward_range
    if verdict.reward is not None and not low <= verdict.reward <= high:
        detail = f"verifier {verifier.name!r}: reward {verdict.reward:g} not in [{low:g}, {high:g}]"
        return Verdict.failed(VerdictStatus.ERROR, detail)
    return verdict


def _verdict(verifier: Verifier, result: Any) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if isinstance(result, Mapping):
        return _weighted(verifier, result)
    reward = finite("the result", result)
    return Verdict.ok(reward, outcome=reward)


def _weighted(verifier: Verifier, parts: Mapping[str, Any]) -> Verdict:
    if verifier.weights is None:
        raise TypeError("named parts, but the decorator declares no weights for them")
    if parts.keys() != verifier.weights.keys():
        raise ValueError(f"parts {sorted(parts)}, but weights {sorted(verifier.weights)}")
    values = {name: finite(f"part {name!r}", value) for name, value in parts.items()}
    reward = sum(weight * values[name] for name, weight in verifier.weights.items())
    return Verdict.ok(reward, parts=values)


def _units(verifier: Verifier, completions: Sequence[str]) -> list[list[str]]:
    return [list(completions)] if verifier.per_group else [[text] for text in completions]


def _argument(verifier: Verifier, unit: list[str]) -> str | list[str]:
    return unit if verifier.per_group else unit[0]


def _checked(verifier: Verifier, result: Any, unit: list[str], start: float) -> list[Verdict]:
    if not verifier.per_group:
        return _everywhere(check(verifier, result), unit, start)
    if not isinstance(result, list | tuple) or len(result) != len(unit):
        got = f"{len(result)} results" if isinstance(result, list | tuple) else type(result)
        detail = f"verifier {verifier.name!r} returned {got} for {len(unit)} completions"
        return _everywhere(Verdict.failed(VerdictStatus.ERROR, detail), unit, start)
    seconds = (time.perf_counter() - start) / len(unit)
    return [replace(check(verifier, value), seconds=seconds) for value in result]


def _everywhere(verdict: Verdict, unit: list[str], start: float) -> list[Verdict]:
    seconds = (time.perf_counter() - start) / len(unit)
    return [replace(verdict, seconds=seconds)] * len(unit)


def _raised(verifier: Verifier, error: BaseException) -> Verdict:
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = (
        f"verifier {verifier.name!r} raised {type(error).__name__}: {str(error)[:300]} "
        f"({where.filename.rpartition('/')[2]}:{where.lineno})"
    )
    return Verdict.failed(VerdictStatus.ERROR, detail)


async def _finish(awaitable: Any) -> Any:
    return await awaitable
