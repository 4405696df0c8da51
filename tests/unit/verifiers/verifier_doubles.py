"""Verifiers that misbehave on command. Their completions say how."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from typing import Any

from verifiers.registry import verifier
from verifiers.verdict import Question, Verdict


@verifier("double_obedient")
def obedient(question: Question, completion: str) -> Any:
    """Does what the completion says; any other completion is scored 1 if it is the answer."""
    match completion.split():
        case ["loop"]:
            while True:
                pass
        case ["exit", code]:
            os._exit(int(code))
        case ["sys.exit"]:
            sys.exit("enough")
        case ["segfault"]:
            ctypes.string_at(0)
        case ["raise"]:
            raise LookupError("no such thing")
        case ["surrogate"]:
            raise LookupError("\ud800")
        case ["memory"]:
            return len(bytearray(1 << 40))
        case ["recurse"]:
            return obedient(question, completion)
        case ["print"]:
            for _ in range(1000):
                print("x" * 10_000)
            return 1.0
        case ["nest"]:
            # Into the pool's own socket: JSON too deep to parse.
            os.write(int(sys.argv[1]), b"[" * 100_000 + b"\n")
        case ["return", expression]:
            return eval(expression, {"nan": float("nan"), "inf": float("inf")})
        case ["pid"]:
            return Verdict.ok(1.0, detail=str(os.getpid()))
        case ["modules"]:
            return Verdict.ok(1.0, detail=" ".join(HEAVY & sys.modules.keys()))
        case ["spawn"]:
            return Verdict.ok(1.0, detail=str(subprocess.Popen(["sleep", "1000"]).pid))
    return completion == question.answer


HEAVY = {"torch", "ray", "vllm", "transformers"}


@verifier("double_async", isolated=False)
async def unhurried(question: Question, completion: str) -> float:
    await asyncio.sleep(1000 if completion == "never" else 0)
    return float(completion == question.answer)


@verifier("double_async_isolated")
async def unhurried_child(question: Question, completion: str) -> float:
    await asyncio.sleep(0)
    return float(completion == question.answer)


@verifier("double_group", per_group=True, isolated=False)
def lengths(question: Question, completions: list[str]) -> Any:
    """Rewards the longest; obeys `short` and `one` by returning too little."""
    if "short" in completions:
        return [1.0] * (len(completions) - 1)
    if "one" in completions:
        return 1.0
    if "bad" in completions:
        return [float("nan") if text == "bad" else 1.0 for text in completions]
    longest = max(map(len, completions))
    return [float(len(text) == longest) for text in completions]


@verifier("double_group_isolated", per_group=True)
def group_or_crash(question: Question, completions: list[str]) -> list[float]:
    if "crash" in completions:
        os._exit(3)
    return [1.0 / len(completions)] * len(completions)


@verifier("double_parts", isolated=False, weights={"format": 0.25, "right": 0.75})
def parts(question: Question, completion: str) -> dict[str, Any]:
    if completion == "missing":
        return {"right": 1.0}
    return {"format": 1.0, "right": completion == question.answer}


@verifier("double_range", isolated=False, reward_range=(-1.0, 0.0))
def penalty(question: Question, completion: str) -> float:
    return float(completion)


@verifier("double_class")
class Stateful:
    """Reports how often it was built and called."""

    built = 0

    def __init__(self) -> None:
        Stateful.built += 1
        self.calls = 0

    def __call__(self, question: Question, completion: str) -> Verdict:
        self.calls += 1
        return Verdict.ok(1.0, parts={"built": self.built, "calls": self.calls})


@verifier("double_broken")
class Broken:
    """Cannot be built."""

    def __init__(self) -> None:
        raise ImportError("a library is missing")

    def __call__(self, question: Question, completion: str) -> float:
        return 1.0


@verifier("double_deadly")
class Deadly:
    """Kills the process that builds it."""

    def __init__(self) -> None:
        os._exit(7)

    def __call__(self, question: Question, completion: str) -> float:
        return 1.0


def undecorated(question: Question, completion: str) -> float:
    return float(time.time() > 0)


class Plain:
    """An undecorated class, found by import path."""

    def __call__(self, question: Question, completion: str) -> float:
        return float(completion == question.answer)


NOT_CALLABLE = 3
