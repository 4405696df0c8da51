"""A Hugging Face folder of the current weights, for transformers and vLLM."""

import json
import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from learner.checkpoint import writing
from learner.collective import Collective
from learner.model import Policy
from learner.publisher import chunk_count, iter_chunks, pack_chunk

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_WRITTEN_HERE = {"config.json", "model.safetensors.index.json"}


def export_hf(
    policy: Policy, source: str, folder: Path, dtype: torch.dtype, ranks: Collective
) -> None:
    """Write weights in `dtype`, config, tokenizer and generation config to `folder`.

    `source` is the model that training started from; whatever its folder holds besides weights is
    copied as it is. All ranks call this, rank 0 writes; `folder` must not exist. Weights are
    gathered one layer group at a time. Raises NotWritten.
    """
    total = chunk_count(policy, dtype)
    writer = _Writer(source, folder, dtype, total) if ranks.rank == 0 else None
    ranks.together(writing(folder, writer.begin if writer else _nothing))
    for number, tensors in enumerate(iter_chunks(policy, dtype, keep=writer is not None)):
        write = _nothing if writer is None else partial(writer.write, number, tensors)
        ranks.together(writing(folder, write))
    ranks.together(writing(folder, writer.finish if writer else _nothing))


class _Writer:
    """The files of one export, on the rank that writes them."""

    def __init__(self, source: str, folder: Path, dtype: torch.dtype, total: int) -> None:
        self._source = source
        self._folder = folder
        self._dtype = dtype
        self._total = total
        self._index: dict[str, str] = {}
        self._bytes = 0

    def begin(self) -> None:
        self._folder.mkdir(parents=True)
        _write_settings(self._source, self._folder, self._dtype)

    def write(self, number: int, tensors: dict[str, Tensor] | None) -> None:
        assert tensors is not None
        name = _shard_name(number, self._total)
        pack_chunk(tensors).tofile(self._folder / name)
        self._index |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> None:
        if self._total > 1:
            content = {"metadata": {"total_size": self._bytes}, "weight_map": self._index}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(content, indent=2, sort_keys=True))


def _nothing() -> None:
    """What the ranks do that write nothing."""


def _shard_name(number: int, total: int) -> str:
    if total == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _write_settings(source: str, folder: Path, dtype: torch.dtype) -> None:
    settings = AutoConfig.from_pretrained(source)
    settings.dtype = dtype
    settings.save_pretrained(folder)
    if Path(source).is_dir():
        for path in Path(source).iterdir():
            keep = path.suffix not in _WEIGHTS and path.name not in _WRITTEN_HERE
            if path.is_file() and keep:
                shutil.copy2(path, folder / path.name)
        return
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:
        return  # Many models have none.
    generation.save_pretrained(folder)
