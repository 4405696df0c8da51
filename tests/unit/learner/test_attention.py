"""Packed rows against one sample at a time, through real transformers models."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from learner.attention import ATTENTION, make_packing

LENGTHS = [1, 5, 31, 30, 2, 29, 12, 3]
_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def _models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**_SIZES)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
        "gemma3": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_SIZES,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=8,
            )
        ),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6, 6], [1]], ids=["ragged", "equal", "one"])
def test_packed_logits_and_gradients_match_single_samples(name: str, lengths: list[int]) -> None:
    model = _models()[name].eval()
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 50, (length,), generator=generator) for length in lengths]
    factors = [torch.randn(length, 50, generator=generator) for length in lengths]

    single = [model(ids[None]).logits[0] for ids in samples]
    sum((x * f).sum() for x, f in zip(single, factors, strict=True)).backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(ATTENTION)
    packed = model(
        torch.cat(samples)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        packing=make_packing(np.array(lengths)),
        use_cache=False,
    ).logits[0]
    (packed * torch.cat(factors)).sum().backward()

    torch.testing.assert_close(packed, torch.cat(single), rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        scale = expected[key].abs().max()
        assert (parameter.grad - expected[key]).abs().max() <= 2e-5 * scale, key


def test_packing_is_a_permutation_with_padding() -> None:
    lengths = np.array(LENGTHS)
    packing = make_packing(lengths)
    assert packing.moves is not None
    tokens = torch.arange(lengths.sum())
    assert torch.equal(packing.moves.sources[packing.moves.slots], tokens)
    assert packing.slot_count == len(packing.moves.sources)
    assert packing.slot_count <= 1.3 * lengths.sum() + 8 * len(lengths)


def test_equal_lengths_move_nothing() -> None:
    packing = make_packing(np.array([4, 4, 4]))
    assert packing.moves is None and packing.slot_count == 12


def test_model_without_packing_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    model.set_attn_implementation(ATTENTION)
    ids: Tensor = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="keyword arguments"):
        model(ids)
