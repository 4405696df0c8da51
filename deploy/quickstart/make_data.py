"""Two-digit sums, split so that no unordered pair of summands is in two of the three sets.

Writes `train.jsonl` (tasks of the run) and `held_out.jsonl` (tasks that accuracy is measured on)
beside this file. The pairs that are left are what `make_model.py` trains the starting model on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SEED = 20
HELD_OUT_TASKS = 512
TRAIN_TASKS = 1024
FOLDER = Path(__file__).resolve().parent


class Split(NamedTuple):
    """Ordered pairs of summands, 10..99 each."""

    held_out: list[tuple[int, int]]
    train: list[tuple[int, int]]
    pretraining: list[tuple[int, int]]


def split() -> Split:
    """The three sets; a function of `SEED` alone."""
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    pairs = [(b, a) if rng.random() < 0.5 else (a, b) for a, b in pairs]
    tasks = HELD_OUT_TASKS + TRAIN_TASKS
    rest = {pair for a, b in pairs[tasks:] for pair in ((a, b), (b, a))}
    return Split(pairs[:HELD_OUT_TASKS], pairs[HELD_OUT_TASKS:tasks], sorted(rest))


def prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_tasks(path: Path, pairs: Iterable[tuple[int, int]]) -> None:
    rows = (
        {"id": f"{a}+{b}", "prompt": prompt(a, b), "answer": str(a + b), "verifier": "exact"}
        for a, b in pairs
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sets = split()
    write_tasks(FOLDER / "train.jsonl", sets.train)
    write_tasks(FOLDER / "held_out.jsonl", sets.held_out)
