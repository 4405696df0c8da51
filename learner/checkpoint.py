"""Checkpoints of a learner: sharded weights and optimizer state, written whole or not at all.

A checkpoint is a folder `step_N` that holds `learner/` (torch.distributed.checkpoint), one file of
random-number state per rank, `state.json` and, once everything else is there, `COMPLETE`. It is
written under a temporary name in the same place, so that whoever shares the folder may add to it
before it is committed by one rename. The folder must be visible to every rank.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from learner.collective import Collective
from learner.messages import CheckpointError, LearnerState
from learner.model import Policy
from learner.optimizer import Optimizer

COMPLETE = "COMPLETE"
_STATE = "state.json"
_TENSORS = "learner"
_FORMAT = 1


def staging_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it becomes `folder`."""
    return folder.with_name(f".{folder.name}.partial")


def save_state(
    staging: Path, policy: Policy, optimizer: Optimizer, ranks: Collective, state: LearnerState
) -> None:
    """Write everything but the marker into `staging`, which is emptied first. All ranks call."""
    if ranks.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    ranks.barrier()
    dcp.save(_tensors(policy, optimizer), checkpoint_id=staging / _TENSORS)
    torch.save(_random_state(), staging / f"random-{ranks.rank}.pt")
    if ranks.rank == 0:
        content = {
            "format": _FORMAT,
            "version": state.version,
            "batches": state.batches,
            "ranks": ranks.world,
            "extra": state.extra,
        }
        (staging / _STATE).write_text(json.dumps(content, indent=2))
    ranks.barrier()


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
    for old in complete_checkpoints(folder.parent)[:-keep]:
        # Without its marker an interrupted removal is no checkpoint.
        (old / COMPLETE).unlink()
        shutil.rmtree(old)


def recover_replaced(parent: Path) -> None:
    """Finish what a kill interrupted while a checkpoint in `parent` was being replaced: the old
    one comes back where no new one took its place, and goes otherwise. One process calls."""
    for aside in parent.glob(".step_*.replaced"):
        folder = parent / aside.name.removeprefix(".").removesuffix(".replaced")
        if folder.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, folder)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints `step_N` in `folder`, lowest N first."""
    found = [
        (int(match[1]), path)
        for path in folder.glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", path.name)) and (path / COMPLETE).exists()
    ]
    return [path for _, path in sorted(found)]


def load_state(
    folder: Path, policy: Policy, optimizer: Optimizer, ranks: Collective
) -> LearnerState:
    """Restore weights, optimizer and random state in place. All ranks call; their number may
    differ from when it was saved (random state is then left alone). Raises CheckpointError."""
    if ranks.rank == 0 and not folder.exists():
        recover_replaced(folder.parent)
    ranks.barrier()
    if not (folder / COMPLETE).exists():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {COMPLETE} marker")
    content = json.loads((folder / _STATE).read_text())
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{folder} has format {content['format']}, this reads {_FORMAT}")
    dcp.load(_tensors(policy, optimizer), checkpoint_id=folder / _TENSORS)
    if content["ranks"] == ranks.world:
        random = torch.load(folder / f"random-{ranks.rank}.pt", weights_only=True)
        torch.set_rng_state(random["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(random["cuda"])
    optimizer.batches = content["batches"]
    return LearnerState(content["version"], content["batches"], content["extra"])


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _tensors(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything sharded, by name; loading writes into these very tensors."""
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state_of(parameter).items():
            tensors[f"adamw.{name}.{key}"] = value
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
