"""Loads published weights inside vLLM's worker process: the receiving end of a weight sync.

vLLM finds it through the `vllm.general_plugins` entry point. It reads safetensors files that the
rollout worker has staged on this node and knows nothing of versions or of where they come from.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.lifeline import follow_owner
from actors.weights import read_chunk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

BACKEND = "slipstream"


def register() -> None:
    """Makes the backend known to this process, which vLLM lets each of its processes call, and
    lets a process that the rollout worker started die with it."""
    follow_owner()
    with suppress(ValueError):  # vLLM may load its plugins several times in one process
        WeightTransferEngineFactory.register_engine(BACKEND, ChunkFileReceiver)
    # It warns on every update about modules without weights of their own, such as a tied head;
    # here a parameter that an update leaves out is an error.
    logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """There is nothing to rendezvous with."""


@dataclass
class ChunkFiles(WeightTransferUpdateInfo):
    """Safetensors files readable on this node, tensors named as in a Hugging Face checkpoint."""

    paths: list[str]


class ChunkFileReceiver(WeightTransferEngine[NoInitInfo, ChunkFiles]):
    """Replaces all weights of the model by those in the files of one update.

    `finish_weight_update` raises RuntimeError when an update left out a parameter: the model
    would go on serving that tensor's old value.
    """

    init_info_cls = NoInitInfo
    update_info_cls = ChunkFiles

    def __init__(
        self,
        config: "WeightTransferConfig",
        vllm_config: "VllmConfig",
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._parameters = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ChunkFiles) -> None:
        model: Any = self.model
        for path in update_info.paths:
            self._loaded |= model.load_weights(read_chunk(path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_output_heads(self.model)
        missing = sorted(self._parameters - self._loaded)
        if missing:
            raise RuntimeError(f"the weight update left out {len(missing)} parameters: {missing}")

    def shutdown(self) -> None:
        pass


def _repack_output_heads(model: torch.nn.Module) -> None:
    """Layerwise reload leaves a tied head's packed CPU copy at the old weights: no weight of its
    own arrives, so nothing triggers the packing again."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
