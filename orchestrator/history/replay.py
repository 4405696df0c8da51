"""`slipstream replay`: the learner does recorded steps again, and every tensor is compared.

From one checkpoint to another, with the batches of the ledger and the groups of the trajectory log.
Needs the learner's resources only; nothing of the run is changed.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from learner.group import LearnerDied
from orchestrator import cluster
from orchestrator.config import RunConfig
from orchestrator.console import Console
from orchestrator.errors import RunError, UsageError
from orchestrator.history.ledger_file import LedgerFile
from orchestrator.history.redo import Redo
from orchestrator.run_directory import RunDirectory
from orchestrator.supervised_learner import explained


@dataclass
class Comparison:
    """How far the tensors of two checkpoints agree."""

    tensors: int = 0
    elements: int = 0
    different: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of each tensor that is not equal bit for bit; NaN where it is
    missing or of another shape."""


def replay(directory: RunDirectory, *, start: int | None, end: int | None) -> Comparison:
    """Do steps `start` + 1 to `end` again and compare the learner's state after them with the
    checkpoint of `end`. None stands for the oldest and for the newest checkpoint.

    Raises UsageError where there is no such checkpoint, RunError when a step cannot be repeated.
    """
    start, end = _bounds(directory.checkpoint_steps(), start, end)
    config = RunConfig.model_validate(directory.read_config())
    console = Console()
    with tempfile.TemporaryDirectory(prefix="slipstream-replay-") as name:
        folder = Path(name)
        config = cluster.connect(config, whole=False)
        try:
            asyncio.run(_replay(config, directory, folder, console, start, end))
        except LearnerDied as error:
            raise explained(error) from error
        finally:
            ray.shutdown()
        return compare(directory.checkpoint(end), folder / f"step_{end}", folder)


async def _replay(
    config: RunConfig,
    directory: RunDirectory,
    folder: Path,
    console: Console,
    start: int,
    end: int,
) -> None:
    ledger_file = LedgerFile(directory.ledger)
    learner = cluster.learner_group(config, folder)
    try:
        store = cluster.create_store(directory.trajectories, folder)
        await learner.start()
        redo = Redo(directory, ledger_file, store, note=console.note)
        await redo(learner, step=end, start=start)
        await learner.save(str(folder / f"step_{end}"), keep=1, export=False)
    finally:
        await learner.close()
        ledger_file.close()


def _bounds(saved: list[int], start: int | None, end: int | None) -> tuple[int, int]:
    known = ", ".join(map(str, saved)) or "none"
    if end is None:
        end = max(saved, default=0)
    if start is None:
        start = min(saved, default=0)
        start = start if start < end else 0
    if end not in saved or (start and start not in saved):
        raise UsageError(
            f"cannot replay from step {start} to {end}: the run has checkpoints of steps {known}. "
            "--from takes one of them or 0, the model that the run began with; --to one of them."
        )
    if start >= end:
        raise UsageError(f"--from {start} is not before --to {end}; checkpoints: {known}.")
    return start, end


def compare(expected: Path, found: Path, scratch: Path) -> Comparison:
    """Every tensor of two checkpoints: weights, optimizer state, kept versions."""
    result = Comparison()
    other = dict(_tensors(found, scratch))
    for name, tensor in _tensors(expected, scratch):
        result.tensors += 1
        result.elements += tensor.numel()
        again = other.pop(name, None)
        if again is None or again.shape != tensor.shape or again.dtype != tensor.dtype:
            result.different[name] = float("nan")
        elif not torch.equal(again.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)):
            result.different[name] = (again.double() - tensor.double()).abs().max().item()
    result.different |= dict.fromkeys(other, float("nan"))
    return result


def _tensors(checkpoint: Path, scratch: Path) -> Iterator[tuple[str, torch.Tensor]]:
    whole = scratch / "whole.pt"
    dcp_to_torch_save(str(checkpoint / "learner"), str(whole))
    yield from _named("", torch.load(whole, weights_only=True))
    for path in sorted(checkpoint.glob("kept-*.pt")):
        kept: dict[int, list[torch.Tensor]] = torch.load(path, weights_only=True)
        for version, shards in kept.items():
            for number, shard in enumerate(shards):
                yield f"{path.stem}.version-{version}.{number}", shard


def _named(prefix: str, content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        yield prefix, content.contiguous()
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _named(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        raise RunError(f"the checkpoint holds {type(content).__name__} at {prefix!r}")
