"""A Hugging Face folder of the current weights, for transformers and vLLM."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

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
    gathered one layer group at a time.
    """
    writes = ranks.rank == 0
    if writes:
        folder.mkdir(parents=True)
        _write_settings(source, folder, dtype)
    total = chunk_count(policy, dtype)
    index: dict[str, str] = {}
    total_bytes = 0
    for number, tensors in enumerate(iter_chunks(policy, dtype, keep=writes)):
        if tensors is not None:
            name = _shard_name(number, total)
            pack_chunk(tensors).tofile(folder / name)
            index |= dict.fromkeys(tensors, name)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if writes and total > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": index}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(content, indent=2, sort_keys=True))
    ranks.barrier()


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
