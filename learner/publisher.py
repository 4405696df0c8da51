"""Weights on their way out: gathered layer group by layer group, cast, laid out as safetensors.

A chunk is the bytes of a safetensors file with the names that `save_pretrained` would write. Only
one layer group is whole at any time, on any rank. Knows neither Ray nor files.
"""

import json
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from learner.messages import ProbeScores, Publication
from learner.model import Policy

CHUNK_BYTES = 64 << 20
"""Small layers share a chunk up to this size; a larger layer has a chunk of its own."""

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@torch.no_grad()
def iter_chunks(
    policy: Policy, dtype: torch.dtype, *, keep: bool
) -> Iterator[dict[str, Tensor] | None]:
    """The weights by name, on the host and in `dtype`, one chunk after the other.

    Every rank must exhaust it, as each chunk takes collectives; those that do not `keep` the
    weights get None. A tied head is not repeated.
    """
    for group in _chunk_groups(policy, dtype):
        gathered = {name: _whole(tensor, dtype) for name, tensor in group}
        if keep:
            host = {name: tensor.to("cpu") for name, tensor in gathered.items()}
            yield revert_weight_conversion(policy.model, host)
        else:
            yield None
        del gathered


def chunk_count(policy: Policy, dtype: torch.dtype) -> int:
    """How many chunks `iter_chunks` gives."""
    return len(_chunk_groups(policy, dtype))


def pack_chunk(tensors: dict[str, Tensor]) -> np.ndarray:
    """uint8 [n]: a safetensors file of these contiguous host tensors, written in one copy."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chunk = np.empty(8 + len(text) + offset, np.uint8)
    chunk[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    chunk[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    data = torch.from_numpy(chunk[8 + len(text) :])
    offset = 0
    for tensor in tensors.values():
        data[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        offset += tensor.nbytes
    return chunk


class PublicationBuilder:
    """Collects what a `Publication` says about chunks as they pass by."""

    def __init__(self) -> None:
        self._names: list[tuple[str, ...]] = []
        self._nbytes: list[int] = []
        self._crc32: list[int] = []

    def add(self, tensors: dict[str, Tensor]) -> np.ndarray:
        """The packed chunk of these tensors."""
        chunk = pack_chunk(tensors)
        self._names.append(tuple(tensors))
        self._nbytes.append(chunk.nbytes)
        self._crc32.append(zlib.crc32(chunk.data))
        return chunk

    def finish(self, label: str, dtype: torch.dtype, probe: ProbeScores | None) -> Publication:
        return Publication(
            label,
            str(dtype).removeprefix("torch."),
            tuple(self._names),
            tuple(self._nbytes),
            tuple(self._crc32),
            probe,
        )


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The full tensor, cast before it is gathered; floating point only."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        tensor = tensor.to_local()
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _chunk_groups(policy: Policy, dtype: torch.dtype) -> list[list[tuple[str, Tensor]]]:
    """Named weights of consecutive layers, the weights outside of layers first."""
    model = policy.model
    layer_of = {
        id(tensor): number
        for number, layer in enumerate(policy.layers)
        for tensor in layer.state_dict(keep_vars=True).values()
    }
    layers: dict[int, list[tuple[str, Tensor]]] = {-1: []}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            layers.setdefault(layer_of.get(id(tensor), -1), []).append((name, tensor))
    groups: list[list[tuple[str, Tensor]]] = []
    room = 0
    for _, members in sorted(layers.items()):
        nbytes = sum(tensor.numel() * dtype.itemsize for _, tensor in members)
        if not groups or nbytes > room:
            groups.append([])
            room = CHUNK_BYTES
        groups[-1] += members
        room -= nbytes
    return groups
