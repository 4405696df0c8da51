"""What a user may set about generation: the `[rollout]` table of a run."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_TRUNCATING = ("top_p", "top_k", "min_p")


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class SamplingConfig(_Table):
    """The distribution that responses are drawn from. There is no top-p, top-k or min-p: they
    renormalise what is sampled, and the learner would train on another distribution."""

    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Logits are divided by it, in the engine and in the learner alike. Greedy (0) cannot train."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens, end-of-sequence token included."""

    @model_validator(mode="before")
    @classmethod
    def _no_truncated_sampling(cls, values: Any) -> Any:
        for name in _TRUNCATING:
            if isinstance(values, dict) and name in values:
                raise ValueError(
                    f"{name} is not offered: it renormalises the sampling distribution, so the "
                    "log-probabilities the learner trains on would be biased. Remove it; "
                    "temperature is the one sampling setting"
                )
        return values


class EngineConfig(_Table):
    """Settings of the vLLM engine inside one rollout worker."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of weights and activations, and so of published weights."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus response, in tokens; absent means the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Samples generated at the same time; bounds the requests in flight as well."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Size of the key-value cache. Absent: 256 MiB on a CPU, what `gpu_memory_utilization`
    leaves on a GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine may take; no effect on a CPU."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens per key-value cache block, which is also the grain of prefix caching; absent leaves
    it to vLLM (128 on a CPU)."""
    enable_prefix_caching: bool = True
    """Share the computed keys and values of equal prompt prefixes within one weight version."""
    chunked_prefill: bool = True
    """Let long prompts be computed over several engine steps."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens per engine step; absent leaves it to vLLM."""
    one_at_a_time: bool = False
    """Compute one sample at a time, so that its arithmetic does not depend on what else runs. Slow;
    a deterministic run sets it."""
    enforce_eager: bool = True
    """Run without compilation, so that no compiler is needed; turn off on GPUs for speed."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Engine processes that share one copy of the model. Values above 1 have not been tested."""
    executor: Literal["auto", "mp", "ray"] = "auto"
    """Where those processes live: mp on the worker's own node, ray on the bundles of the worker's
    placement group. Auto is mp above one process."""
    export_metrics: bool = True
    """Hand vLLM's own metrics to Ray's exporter, which names them `ray_vllm_*`; not done on a Ray
    that a run starts for itself."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Base of the engine's random stream; each worker derives its own from it."""

    @model_validator(mode="after")
    def _prompts_fit_a_step(self) -> Self:
        if not self.chunked_prefill and self.max_batched_tokens is not None:
            if self.max_model_len is None:
                raise ValueError(
                    "max_batched_tokens without chunked prefill needs max_model_len, which it "
                    "must not be below"
                )
            if self.max_batched_tokens < self.max_model_len:
                raise ValueError(
                    f"max_batched_tokens {self.max_batched_tokens} is below max_model_len "
                    f"{self.max_model_len}: without chunked prefill a prompt has to fit one step"
                )
        return self


class ProbeConfig(_Table):
    """The fixed probe that compares engine and learner after each weight load."""

    prompts: int = Field(default=4, ge=1, le=256)
    """Prompts in the probe."""
    positions: int = Field(default=32, ge=1, le=1024)
    """Positions compared, over all prompts together."""
    top_k: int = Field(default=8, ge=1, le=20)
    """Most likely tokens compared at each position."""


class RolloutConfig(_Table):
    """How the rollout fleet is sized and how it samples."""

    workers: int = Field(default=1, ge=1)
    """Rollout workers, each one Ray actor with an engine of its own."""
    cpus: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray reserves per worker."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs that Ray reserves per worker."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources per worker, to pin the fleet to certain nodes."""
    threads: int = Field(default=1, ge=1)
    """Compute threads per engine process."""
    samples_per_group: int = Field(default=8, ge=1)
    """Samples drawn for each task (G)."""
    groups_per_call: int = Field(default=8, ge=1)
    """Groups handed to a worker in one call."""
    sampling: SamplingConfig = SamplingConfig()
    """The sampling distribution."""
    seeded: bool = False
    """Give every request a seed of its own, so that a retry draws the same samples."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engine."""
    probe: ProbeConfig = ProbeConfig()
    """The parity probe."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest time from creating a worker to a served engine."""
    progress_timeout_s: float = Field(default=120.0, gt=0.0)
    """Longest time without a new token while groups are in flight, pauses excepted."""
    sync_timeout_s: float = Field(default=120.0, gt=0.0)
    """Longest time for each stage of a weight sync: fetch, load, probe."""

    @model_validator(mode="after")
    def _a_group_fits(self) -> Self:
        if self.samples_per_group > self.engine.max_num_seqs:
            raise ValueError(
                f"samples_per_group {self.samples_per_group} exceeds engine.max_num_seqs "
                f"{self.engine.max_num_seqs}: a group has to fit the engine at once"
            )
        limit = self.engine.max_model_len
        if limit is not None and self.sampling.max_tokens >= limit:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len {limit}"
            )
        return self

    @model_validator(mode="after")
    def _seeds_are_supported(self) -> Self:
        if self.seeded and self.engine.chunked_prefill:
            raise ValueError(
                "seeded sampling needs engine.chunked_prefill = false: vLLM's CPU engine dies "
                "when a seeded request's prompt is computed in chunks"
            )
        return self

    @model_validator(mode="after")
    def _gpus_suffice(self) -> Self:
        tensor_parallel = self.engine.tensor_parallel_size
        if 0 < self.gpus < tensor_parallel and tensor_parallel > 1:
            raise ValueError(
                f"engine.tensor_parallel_size {tensor_parallel} needs gpus = {tensor_parallel} "
                f"per worker, got {self.gpus:g}"
            )
        return self

    @property
    def max_groups_in_flight(self) -> int:
        """Groups that a worker generates at the same time."""
        return self.engine.max_num_seqs // self.samples_per_group

    def bundles(self) -> list[dict[str, float]]:
        """Ray placement bundles of one worker; the first is the actor's own."""
        own = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        if self.engine.executor != "ray":
            return [{name: amount for name, amount in own.items() if amount}]
        actor = {"CPU": max(self.cpus, 1.0), **self.resources}
        return [actor, *({"GPU": 1.0} for _ in range(self.engine.tensor_parallel_size))]
