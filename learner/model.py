"""The policy: a Hugging Face causal language model over packed rows, sharded with FSDP2.

Turns token rows into what a head makes of the hidden states that predict response tokens. Knows
neither objectives nor optimizers. Master weights are float32; forward and backward run in the
configured dtype; dropout is off, so that a scoring pass and a training pass agree.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from learner.attention import ATTENTION
from learner.config import LearnerConfig
from learner.logprobs import token_logprobs, top_logprobs
from learner.messages import ModelError
from learner.rows import PackedRow

M = TypeVar("M", bound=nn.Module)
Head = Callable[[Tensor, Tensor], Any]
"""(hidden [M, E], head weight [V, E]) → tensors."""

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A causal language model without its logits: a head sees hidden states and head weight."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # A tuple: the layers are registered in `model` already.
        self.layers = decoder_layers(model)

    def forward(self, row: PackedRow, head: Head) -> Any:
        """head(hidden states at `row.predictors` [M, E], output weight [V, E]).

        Everything that the head needs from sharded weights must happen inside this call.
        """
        output = self.model.base_model(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            packing=row.packing,
        )
        hidden = output.last_hidden_state[0].index_select(0, row.predictors)
        return head(hidden, self.model.get_output_embeddings().weight)

    def logprobs(self, row: PackedRow, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each target of the row at its temperature, [M] each."""
        return self(
            row,
            lambda hidden, weight: token_logprobs(
                hidden, weight, row.targets, row.temperature, chunk_tokens
            ),
        )

    def top_logprobs(
        self, row: PackedRow, temperature: float, top_k: int, chunk_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Likeliest next tokens after each predictor of the row, see `logprobs.top_logprobs`."""
        return self(
            row,
            lambda hidden, weight: top_logprobs(hidden, weight, temperature, top_k, chunk_tokens),
        )

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Forward passes without gradient, after which parameters are sharded again."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.reshard_all()

    def reshard_all(self) -> None:
        """Drop gathered parameters, so that a change to the shards is seen by the next pass."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def load_policy(path: str | Path, config: LearnerConfig, mesh: DeviceMesh) -> Policy:
    """The model in `path` (folder or hub name), its float32 shards on the mesh's device.

    Raises ModelError when the folder does not load or needs what packed rows do not offer.
    Each rank loads the whole model into host memory before it keeps its shard.
    """
    return shard(Policy(load_model(path, torch.float32).eval()), config, mesh)


def load_frozen(
    path: str | Path, config: LearnerConfig, mesh: DeviceMesh, *, offload: bool
) -> Policy:
    """As `load_policy`, for a policy that never changes: its shards have the dtype of the forward
    pass, and stay in host memory with `offload` (on a CPU they are there anyway)."""
    policy = Policy(load_model(path, getattr(torch, config.param_dtype)).eval())
    policy.requires_grad_(False)
    on_host = offload and mesh.device_type != "cpu"
    return shard(policy, config, mesh, CPUOffloadPolicy() if on_host else None)


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model in host memory. Raises ModelError."""
    if str(path).count("/") > 1 and not Path(path).is_dir():
        raise ModelError(f"model {path}: there is no such folder")
    try:
        settings = AutoConfig.from_pretrained(path)
        _check_supported(settings)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=settings, dtype=dtype, attn_implementation=ATTENTION
        )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model {path} does not load: {error}") from error
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"model {path} has a bias on its output head, which is not supported")
    return model


def shard(
    policy: Policy,
    config: LearnerConfig,
    mesh: DeviceMesh,
    offload: OffloadPolicy | None = None,
) -> Policy:
    """Shard a policy in place: each decoder layer, and the rest as one group."""
    return shard_module(policy, policy.layers, config, mesh, offload)


def shard_module(
    module: M,
    layers: Sequence[nn.Module],
    config: LearnerConfig,
    mesh: DeviceMesh,
    offload: OffloadPolicy | None = None,
) -> M:
    """Shard any module in place: each of its `layers`, and the rest as one group."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=False,
    )
    offloading = offload or OffloadPolicy()
    for layer in layers:
        if config.activation_checkpointing:
            # Inside FSDP's hooks, so that recomputation finds the parameters gathered.
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offloading)
    fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offloading)
    return module


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The repeated blocks of a model that is not sharded yet, in order."""
    names = set(model._no_split_modules or ())
    layers = tuple(module for module in model.modules() if type(module).__name__ in names)
    if not layers:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are layers")
    return layers


def local_shards(policy: nn.Module) -> list[Tensor]:
    """This rank's part of each parameter, detached and sharing its memory."""
    return [local(parameter.detach()) for parameter in policy.parameters()]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_supported(settings: PretrainedConfig) -> None:
    name = settings.model_type
    kinds = set(getattr(settings, "layer_types", None) or ()) - _ATTENTION_KINDS
    if kinds:
        raise ModelError(f"{name} mixes tokens by {', '.join(sorted(kinds))}: not supported packed")
    for transform in _LOGIT_TRANSFORMS:
        if getattr(settings, transform, None) not in (None, 1.0):
            raise ModelError(f"{name} transforms its logits ({transform}), which is not supported")
