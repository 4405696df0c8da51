"""Rows of trajectory batches as flat arrays, and packed micro-batches of tensors made from them.

Sits between the Arrow batches and the model: token values are copied once, from Arrow's memory
into the packed row, and never re-tokenised, rounded or reordered within a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from actors import trajectory
from learner.attention import Packing, make_packing
from learner.packing import ragged_index


@dataclass(frozen=True, eq=False)
class Rows:
    """S samples. Sample i has tokens `tokens[starts[i] : starts[i + 1]]`, its prompt first.

    The flat response arrays (`behavior`, `mask`, `versions`) are indexed by `response_starts`.
    """

    sample_ids: list[str]
    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    behavior: np.ndarray
    mask: np.ndarray
    versions: np.ndarray
    response_starts: np.ndarray
    temperature: np.ndarray

    @property
    def response_lengths(self) -> np.ndarray:
        return np.diff(self.response_starts)

    @cached_property
    def positions(self) -> np.ndarray:
        """int64, flat over response tokens: the place of each in its response, from 0."""
        return ragged_index(np.zeros(len(self.response_lengths), np.int64), self.response_lengths)

    @cached_property
    def crossed(self) -> np.ndarray:
        """bool, flat over response tokens: sampled after an update in mid-generation, and so with
        keys and values of an older version in the cache."""
        first = np.repeat(self.response_starts[:-1], self.response_lengths)
        return self.versions != self.versions[first]


def read_rows(batches: Sequence[pa.RecordBatch]) -> Rows:
    """All rows of validated batches, in order."""
    prompts = _flat(batches, "prompt_ids", np.int32)
    responses = _flat(batches, "response_ids", np.int32)
    prompt_lengths, response_lengths = np.diff(prompts[1]), np.diff(responses[1])
    starts = _starts(prompt_lengths + response_lengths)
    flat = np.empty(int(starts[-1]), np.int32)
    flat[ragged_index(starts[:-1], prompt_lengths)] = prompts[0]
    flat[ragged_index(starts[:-1] + prompt_lengths, response_lengths)] = responses[0]
    return Rows(
        [name for batch in batches for name in batch.column("sample_id").to_pylist()],
        flat,
        starts,
        prompt_lengths,
        _flat(batches, "behavior_logprobs", np.float32)[0],
        _flat(batches, "loss_mask", np.bool_)[0],
        _concatenate([trajectory.token_versions(batch) for batch in batches], np.int64),
        responses[1],
        _concatenate([batch.column("temperature").to_numpy() for batch in batches], np.float32),
    )


def _flat(
    batches: Sequence[pa.RecordBatch], column: str, dtype: type[np.generic]
) -> tuple[np.ndarray, np.ndarray]:
    parts = [trajectory.tokens(batch, column) for batch in batches]
    lengths = _concatenate([np.diff(offsets) for _, offsets in parts], np.int64)
    return _concatenate([values for values, _ in parts], dtype), _starts(lengths)


def _concatenate(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts])


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A micro-batch as one row of N tokens with M positions to predict.

    input_ids, position_ids int64 [N]; predictors int64 [M] index the N tokens; targets int64 [M]
    and temperature float32 [M] belong to the predictors, sample by sample in response order;
    sample_index int64 [M] counts samples within the row.
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: Packing
    predictors: Tensor
    targets: Tensor
    temperature: Tensor
    sample_index: Tensor
    num_samples: int

    def at_temperature(self, temperature: float) -> "PackedRow":
        """The same row with one temperature for all."""
        return replace(self, temperature=torch.full_like(self.temperature, temperature))


def pack(
    rows: Rows, samples: np.ndarray, device: torch.device, ends: np.ndarray | None = None
) -> PackedRow:
    """Pack these samples (indices into `rows`), each with its response up to `ends` (default all).

    The last token of a sample predicts nothing and is left out. No sample at all gives a row of
    one token and no predictor, which still takes part in every collective of a forward pass.
    """
    if not len(samples):
        return dummy_row(device)
    responses = rows.response_lengths[samples] if ends is None else ends
    prompts = rows.prompt_lengths[samples]
    lengths = prompts + responses - 1
    source = ragged_index(rows.starts[samples], lengths)
    first = np.cumsum(lengths) - lengths
    targets = ragged_index(rows.starts[samples] + prompts, responses)
    return PackedRow(
        input_ids=_tensor(rows.tokens[source], torch.int64, device),
        position_ids=_tensor(
            np.arange(len(source)) - np.repeat(first, lengths), torch.int64, device
        ),
        packing=make_packing(lengths, device),
        predictors=_tensor(ragged_index(first + prompts - 1, responses), torch.int64, device),
        targets=_tensor(rows.tokens[targets], torch.int64, device),
        temperature=_tensor(np.repeat(rows.temperature[samples], responses), torch.float32, device),
        sample_index=_tensor(np.repeat(np.arange(len(samples)), responses), torch.int64, device),
        num_samples=len(samples),
    )


def pack_sequences(
    sequences: Sequence[Sequence[int]], positions: Sequence[tuple[int, int]], device: torch.device
) -> PackedRow:
    """Pack whole sequences; predictors are (sequence, position) pairs, with no targets."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    first = np.cumsum(lengths) - lengths
    predictors = np.array([first[row] + position for row, position in positions], np.int64)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PackedRow(
        input_ids=_tensor(np.concatenate([np.asarray(s) for s in sequences]), torch.int64, device),
        position_ids=_tensor(ragged_index(np.zeros_like(first), lengths), torch.int64, device),
        packing=make_packing(lengths, device),
        predictors=_tensor(predictors, torch.int64, device),
        targets=nothing,
        temperature=nothing.float(),
        sample_index=nothing,
        num_samples=len(sequences),
    )


def dummy_row(device: torch.device) -> PackedRow:
    """One token, no predictor."""
    return pack_sequences([[0]], [], device)


def response_index(rows: Rows, samples: np.ndarray) -> np.ndarray:
    """int64 [M]: where the response tokens of these samples lie in the flat response arrays."""
    return ragged_index(rows.response_starts[samples], rows.response_lengths[samples])


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)
