"""Checkpoints of a learner: sharded weights and optimizer state, written whole or not at all.

A checkpoint is a folder `step_N` that holds `learner/` (torch.distributed.checkpoint), per rank a
file of random-number state and one of the kept versions, `state.json` and, once everything else is
there, `COMPLETE`. It is
written under a temporary name in the same place and committed by one rename. The folder must be
visible to every rank.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from learner.collective import Collective
from learner.layout import COMPLETE, finished_steps
from learner.messages import CheckpointError, LearnerState, NotWritten
from learner.optimizer import Optimizer
from learner.versions import VersionStore

_STATE = "state.json"
_TENSORS = "learner"
_FORMAT = 2
_LITTLE_BYTES = 1 << 30


def staging_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it becomes `folder`."""
    return folder.with_name(f".{folder.name}.partial")


@dataclass(frozen=True)
class Part:
    """A trained module and its optimizer; `prefix` goes before the names of their tensors."""

    prefix: str
    module: nn.Module
    optimizer: Optimizer


def save_state(
    staging: Path,
    parts: Sequence[Part],
    store: VersionStore,
    ranks: Collective,
    state: LearnerState,
) -> None:
    """Write everything but the marker into `staging`, which is emptied first. All ranks call.

    Raises NotWritten.
    """

    def make_room() -> None:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def write_the_rest() -> None:
        _save(_random_state(), staging / f"random-{ranks.rank}.pt")
        _save(store.copies(), staging / f"kept-{ranks.rank}.pt")
        if ranks.rank == 0:
            content = {
                "format": _FORMAT,
                "version": state.version,
                "batches": state.batches,
                "ranks": ranks.world,
            }
            (staging / _STATE).write_text(json.dumps(content, indent=2))

    ranks.together(writing(staging, make_room))
    try:
        dcp.save(_tensors(parts), checkpoint_id=staging / _TENSORS)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise _not_written(staging, cause) from error
    ranks.together(writing(staging, write_the_rest))


def writing(path: Path, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, which writes files at `path`, with NotWritten where they cannot be."""

    def attempt() -> None:
        try:
            work()
        except OSError as error:
            raise _not_written(path, error) from error

    return attempt


def discard(folder: Path) -> None:
    """Remove what was written of a checkpoint that is not to be. One process calls."""
    shutil.rmtree(staging_folder(folder), ignore_errors=True)


def _save(content: Any, path: Path) -> None:
    """torch.save, which says RuntimeError when the disk is full."""
    try:
        torch.save(content, path)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _not_written(path: Path, cause: BaseException) -> NotWritten:
    lines = str(cause).splitlines() or [type(cause).__name__]
    text = f"no checkpoint was written to {path.parent}: {lines[0]}"
    free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
    if free < _LITTLE_BYTES:
        text += f" ({free >> 20} MiB are free: free space, or lower checkpoint.keep)"
    return NotWritten(text)


def commit(folder: Path, *, keep: int) -> None:
    """Turn the staging folder of `folder` into `folder`, then leave only the `keep` newest
    complete checkpoints beside it. One process calls."""
    staging = staging_folder(folder)
    (staging / COMPLETE).touch()
    for path in (*staging.rglob("*"), staging):
        _sync(path)
    recover_replaced(folder.parent)
    if folder.exists():
        # Removing it here instead would lose a complete checkpoint to a kill before the rename.
        os.rename(folder, _aside(folder))
    os.rename(staging, folder)
    _sync(folder.parent)
    recover_replaced(folder.parent)
    for step in finished_steps(folder.parent)[:-keep]:
        # Without its marker an interrupted removal is no checkpoint.
        (folder.with_name(f"step_{step}") / COMPLETE).unlink()
    for left in (*folder.parent.glob(".step_*.partial"), *folder.parent.glob("step_*")):
        # Of this removal, or of a save or a removal that was interrupted.
        if left.is_dir() and not (left / COMPLETE).exists():
            shutil.rmtree(left)


def recover_replaced(parent: Path) -> None:
    """Finish what a kill interrupted while a checkpoint in `parent` was being replaced: the old
    one comes back where no new one took its place, and goes otherwise. One process calls."""
    for aside in parent.glob(".step_*.replaced"):
        folder = parent / aside.name.removeprefix(".").removesuffix(".replaced")
        if folder.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, folder)


def load_state(
    folder: Path, parts: Sequence[Part], store: VersionStore, ranks: Collective
) -> LearnerState:
    """Restore weights, optimizer, random state and kept versions in place. All ranks call; their
    number may differ from when it was saved: random state is then left alone, and no version is
    kept. Raises CheckpointError."""
    if ranks.rank == 0 and not folder.exists():
        recover_replaced(folder.parent)
    ranks.barrier()
    if not (folder / COMPLETE).exists():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {COMPLETE} marker")
    content = json.loads((folder / _STATE).read_text())
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{folder} has format {content['format']}, this reads {_FORMAT}")
    try:
        dcp.load(_tensors(parts), checkpoint_id=folder / _TENSORS)
    except (RuntimeError, CheckpointException) as error:
        raise CheckpointError(
            f"{folder} does not hold this learner: {error}. Resume with the objective and the "
            "model that it was saved with"
        ) from error
    store.put_back({})
    if content["ranks"] == ranks.world:
        store.put_back(torch.load(folder / f"kept-{ranks.rank}.pt", weights_only=True, mmap=True))
        random = torch.load(folder / f"random-{ranks.rank}.pt", weights_only=True)
        torch.set_rng_state(random["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(random["cuda"])
    for part in parts:
        part.optimizer.batches = content["batches"]
    return LearnerState(content["version"], content["batches"])


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _tensors(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Everything sharded, by name; loading writes into these very tensors."""
    tensors = {}
    for part in parts:
        for name, parameter in part.module.named_parameters():
            tensors[f"{part.prefix}model.{name}"] = parameter.detach()
            for key, value in part.optimizer.state_of(parameter).items():
                tensors[f"{part.prefix}adamw.{name}.{key}"] = value
    return tensors


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
