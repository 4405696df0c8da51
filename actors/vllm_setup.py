"""How vLLM is started: environment, engine arguments, progress counter.

It translates `EngineConfig` into vLLM's terms and knows nothing of requests or weights.
"""

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.config import EngineConfig
from actors.lifeline import OWNER_VARIABLE

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

_BACKEND = "slipstream"
_CPU_KV_CACHE_BYTES = 256 << 20


def environment(model: str, config: EngineConfig, threads: int) -> dict[str, str]:
    """Variables of the process that starts vLLM, to be set before vLLM is imported."""
    values = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        OWNER_VARIABLE: str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        # The CPU platform replaces the uni executor by a further process unless this is off; the
        # core of an AsyncLLM has its own process either way.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if config.enforce_eager:
        # Parts of the sampler are compiled even in eager mode, which needs a C++ compiler.
        values["TORCHDYNAMO_DISABLE"] = "1"
    if _executor(config) != "ray":
        values["VLLM_HOST_IP"] = "127.0.0.1"
    if Path(model).is_dir():
        values["HF_HUB_OFFLINE"] = "1"
    return values


def engine_arguments(
    model: str, tokenizer: str, config: EngineConfig, *, reserved_sequences: int
) -> "AsyncEngineArgs":
    """vLLM's arguments; `reserved_sequences` are those it serves beyond `max_num_seqs`."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    kv_cache_bytes = config.kv_cache_bytes
    if kv_cache_bytes is None and current_platform.is_cpu():
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    return AsyncEngineArgs(
        model=model,
        tokenizer=tokenizer,
        dtype=config.dtype,
        seed=config.seed,
        max_model_len=config.max_model_len,  # type: ignore[arg-type]  # None is its default
        max_num_seqs=config.max_num_seqs + reserved_sequences,
        max_num_batched_tokens=config.max_batched_tokens,
        enable_chunked_prefill=config.chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        block_size=config.block_size,
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=_executor(config),
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=_BACKEND),
        disable_log_stats=True,
    )


def require_plugin() -> None:
    """RuntimeError unless vLLM's processes will find the weight receiver."""
    if not any(e.name == _BACKEND for e in entry_points(group="vllm.general_plugins")):
        raise RuntimeError(
            "the package slipstream-rl is not installed in this environment, so vLLM cannot find "
            "the weight receiver: pip install it on every node"
        )


def step_counter(count: Callable[[int, int], None]) -> Any:
    """A vLLM stat logger class that reports (generated, cache hit) tokens of each engine step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepCounter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            count(
                iteration_stats.num_generation_tokens if iteration_stats else 0,
                scheduler_stats.prefix_cache_stats.hits if scheduler_stats else 0,
            )

        def log_engine_initialized(self) -> None:
            pass

    return StepCounter


def ray_exporter() -> list[Any]:
    """vLLM's stat logger for Ray's metrics agent; none outside of Ray."""
    import ray

    if not ray.is_initialized():
        return []
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]


def _executor(config: EngineConfig) -> str:
    if config.executor != "auto":
        return config.executor
    return "uni" if config.tensor_parallel_size == 1 else "mp"
