"""The learner's table of the run config: ranks, precision, optimizer, objective. No torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.model_path import ModelPath
from learner.objective_config import (
    CORRECTIONS,
    PRESETS,
    AdvantageConfig,
    AggregationConfig,
    ClipConfig,
    CorrectionConfig,
    CovarianceConfig,
    CriticConfig,
    KeepInterval,
    KLConfig,
    ObjectiveConfig,
    RatioConfig,
    expand,
)

__all__ = [
    "CORRECTIONS",
    "PRESETS",
    "AdvantageConfig",
    "AggregationConfig",
    "ClipConfig",
    "CorrectionConfig",
    "CovarianceConfig",
    "CriticConfig",
    "KLConfig",
    "KeepInterval",
    "LearnerConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RatioConfig",
    "ReferenceConfig",
    "ScheduleConfig",
    "ValueModelConfig",
    "expand",
]


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class OptimizerConfig(_Config):
    """AdamW on float32 master weights."""

    lr: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay."""
    grad_clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Largest global gradient norm; a huge value never clips."""

    @model_validator(mode="after")
    def _betas_decay(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must lie in [0, 1), got {self.betas}")
        return self


class ScheduleConfig(_Config):
    """Learning rate over the run's steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at 0 at the run's last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Batch steps over which the rate rises linearly from 0."""


class ReferenceConfig(_Config):
    """A frozen policy that the trained one is kept close to; costs one forward pass per batch."""

    path: ModelPath | None = None
    """The model; the one that training starts from when absent."""
    offload: bool = False
    """Keep its weights in host memory between uses; without effect on a CPU."""


class ValueModelConfig(_Config):
    """The critic's model, of objectives whose baseline is one (ppo)."""

    path: ModelPath | None = None
    """The model whose body it starts from; the one that training starts from when absent."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """AdamW settings of its own."""


class LearnerConfig(_Config):
    """One group of FSDP ranks that trains on batches of groups."""

    ranks: int = Field(default=1, ge=1)
    """Learner processes; parameters, gradients and optimizer state are sharded over them."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves per rank."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves per rank."""
    resources: dict[str, float] = {}
    """Custom Ray resources per rank."""
    threads: int = Field(default=1, ge=1)
    """torch threads per rank."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; auto is nccl where a rank has a GPU, else gloo."""

    groups_per_batch: int = Field(default=16, ge=1)
    """Groups consumed by one batch step (B)."""
    optimizer_steps_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps taken on one batch, each over its own share of the groups."""
    token_budget: int = Field(default=16384, ge=1)
    """Tokens (prompt and response) of one micro-batch; a longer sample gets one of its own."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and activations in forward and backward; master weights are float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over ranks."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in backward: less memory, about a third more compute."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at one time; bounds the memory of the output head."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    reference: ReferenceConfig | None = None
    """The reference policy of `objective.kl`; none is loaded when absent."""
    value_model: ValueModelConfig = ValueModelConfig()
    """The critic's model; built only where the objective's baseline is a critic."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is optimised: a preset and its overrides."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline for all ranks to load the model and form their group."""
    save_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time of a checkpoint, before the learner counts as dead."""
    step_timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one batch step."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """After this long in one collective a rank counts as lost."""

    @model_validator(mode="after")
    def _steps_have_groups(self) -> Self:
        if self.optimizer_steps_per_batch > self.groups_per_batch:
            raise ValueError(
                f"optimizer_steps_per_batch {self.optimizer_steps_per_batch} needs at least as "
                f"many groups, got groups_per_batch {self.groups_per_batch}"
            )
        return self

    def warnings(self) -> tuple[str, ...]:
        """Sentences about choices that are allowed but do nothing useful."""
        notes = self.objective.warnings()
        if self.objective.ratio.anchor == "step_start" and self.optimizer_steps_per_batch == 1:
            notes += (
                "ratio.anchor 'step_start' with one optimizer step per batch never clips: "
                "the ratio is 1; use anchor 'old', or raise optimizer_steps_per_batch",
            )
        return notes
