"""AdamW over the sharded float32 weights: schedule, global gradient norm, clipping, skipping."""

import math

import torch
from torch import Tensor, nn

from learner.collective import Collective
from learner.config import OptimizerConfig, ScheduleConfig
from learner.model import local


def learning_rate_factor(schedule: ScheduleConfig, batch: int, total: int) -> float:
    """Share of the peak rate at batch step `batch` (from 0) of `total`: linear warm-up, which
    reaches the peak at its last step, then the schedule's shape, which would be 0 at `total`."""
    warmup = schedule.warmup_steps
    if batch < warmup:
        return (batch + 1) / warmup
    progress = min(1.0, (batch - warmup) / max(1, total - warmup))
    if schedule.kind == "linear":
        return 1.0 - progress
    if schedule.kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


class Optimizer:
    """AdamW; weight decay acts on matrices only. `batches` counts batch steps, skipped ones too."""

    def __init__(
        self,
        policy: nn.Module,
        config: OptimizerConfig,
        schedule: ScheduleConfig,
        ranks: Collective,
    ) -> None:
        self._parameters = list(policy.parameters())
        self._config = config
        self._schedule = schedule
        self._ranks = ranks
        self.batches = 0
        matrices = [p for p in self._parameters if p.ndim > 1]
        others = [p for p in self._parameters if p.ndim <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def begin_batch(self, total: int) -> float:
        """Learning rate of the next batch, of `total`, now set; counts the batch."""
        factor = learning_rate_factor(self._schedule, self.batches, total)
        for group in self.adamw.param_groups:
            group["lr"] = self._config.lr * factor
        self.batches += 1
        return self._config.lr * factor

    def total_norm(self, loss: Tensor, trained_tokens: Tensor) -> tuple[float, float, bool]:
        """(global gradient norm, trained tokens, all finite), the same on every rank; the
        arguments are this rank's share of the step."""
        gradients = self._gradients()
        squares = torch.zeros((), dtype=torch.float64, device=loss.device)
        if gradients:
            squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        broken = ~torch.isfinite(loss)
        shares = torch.stack([squares, trained_tokens.double(), broken.double()])
        total, trained, any_broken = self._ranks.sum(shares).tolist()
        return math.sqrt(total), trained, not any_broken and math.isfinite(total)

    def apply(self, norm: float) -> None:
        """Clip the gradients, whose global norm is `norm`, and take the step."""
        excess = self._config.grad_clip / (norm + 1e-6)
        if excess < 1:
            torch._foreach_mul_(self._gradients(), excess)
        self.adamw.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's moments and step count of this parameter, created if there are none yet."""
        state = self.adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]
