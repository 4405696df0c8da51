"""Tiny random Llama models with a tiny tokenizer, and weight chunks made from them."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"0123456789+-*/=()abcdefghijklmnopqrstuvwxyz .,"]
PAD, EOS, BOS = 0, 1, 2


def tiny_llama(*, tied: bool, seed: int, eos_bias: float = 0.0) -> LlamaForCausalLM:
    """Float32, 2 layers, 64 wide, weights large enough that a wrong tensor shows.

    `eos_bias` scales the end-of-sequence row of the output head, to make responses end.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=None,
            initializer_range=0.15,
        )
    ).eval()
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 1.0 + eos_bias
    return model


def save_model(model: LlamaForCausalLM, folder: Path) -> Path:
    """Model and tokenizer as transformers and vLLM load them."""
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def tensors_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint holds: a tied head is not among them."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def chunks_of(tensors: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """uint8 arrays, each the bytes of a safetensors file: one per layer, one for the rest."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        key = parts[2] if parts[1:2] == ["layers"] else "rest"
        groups.setdefault(key, {})[name] = tensor.contiguous()
    return [np.frombuffer(save(group), dtype=np.uint8) for group in groups.values()]


@torch.no_grad()
def next_token_logprobs(
    model: LlamaForCausalLM, token_ids: list[int], temperature: float
) -> torch.Tensor:
    """float32 [tokens, vocabulary]: row i predicts the token after position i."""
    logits = model(torch.tensor([token_ids])).logits[0].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def response_logprobs(
    model: LlamaForCausalLM, prompt: list[int], response: list[int], temperature: float
) -> np.ndarray:
    """float32 [response]: what the response's tokens cost under `model`."""
    rows = next_token_logprobs(model, [*prompt, *response], temperature)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
