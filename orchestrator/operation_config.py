"""The tables that say how a run is operated: evaluated, saved, watched, steered, given up."""

from ipaddress import ip_address
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orchestrator.config_base import InputPath, Table


class EvaluationConfig(Table):
    """Evaluation on the held-out tasks, always before the first and after the last step."""

    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Samples over which a task's accuracy is averaged."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sampling temperature, whatever training samples at."""
    max_tasks: Annotated[int | None, Field(ge=1)] = None
    """Evaluate the first so many tasks; all by default."""
    every: Annotated[int, Field(ge=0)] = 0
    """Also after every so many steps; 0 for only before and after."""


class CheckpointConfig(Table):
    """Saving of the learner's state; the end of a run always saves."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints, and so the most that has to be done again after a crash; 0 for
    only at the end."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints to keep."""
    export: bool = True
    """Also write a Hugging Face folder with each checkpoint."""


NODE_HOST = "node"
"""Stands for the address that the driver's node has in the cluster."""


class MetricsConfig(Table):
    """The Prometheus endpoint; metrics.jsonl is always written."""

    enabled: bool = True
    """Whether to serve the endpoint."""
    host: str = "127.0.0.1"
    """Address to bind; `node` is the address that the driver's node has in the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 takes any free one, which the console then names."""


class ControlConfig(Table):
    """The control service (gRPC), through which a live run is watched and steered."""

    enabled: bool = True
    """Whether to serve it."""
    host: str = "127.0.0.1"
    """Address to bind; `node` is the address that the driver's node has in the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 takes any free one, which control.json in the run directory then names."""
    token: Literal["required", "none"] = "required"
    """Whether a caller must show the run's token: that of SLIPSTREAM_TOKEN in the environment, or
    a new random one. None is refused unless `host` is a loopback address."""
    tls_cert: InputPath | None = None
    """Certificate chain (PEM) to serve TLS with."""
    tls_key: InputPath | None = None
    """Private key (PEM) of `tls_cert`."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; one of them is missing")
        if self.token == "none" and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} without a token would let everyone who reaches it steer the "
                'run; set token = "required", or host = "127.0.0.1"'
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ScaleBounds(Table):
    """Within which the autoscaler may move one fleet."""

    min_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Fewest workers."""
    max_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Most workers; equal to `min_workers` the role is left alone."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers {self.min_workers} exceeds max_workers {self.max_workers}"
            )
        return self


class AutoscalerConfig(Table):
    """Scaling by itself: what the learner waits for gets workers, what idles gives some up."""

    enabled: bool = False
    """Whether to scale without being told."""
    rollout: ScaleBounds = ScaleBounds()
    """Bounds of the rollout fleet."""
    verifiers: ScaleBounds = ScaleBounds()
    """Bounds of the verifier fleet."""
    period_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds between two looks."""
    patience: Annotated[int, Field(ge=1, le=100)] = 3
    """Looks in a row that must agree before a worker is added or given up."""
    cooldown_s: Annotated[float, Field(ge=0, le=86400)] = 120.0
    """Seconds after a change in which a role is left alone; longer than a worker takes to start."""
    scale_up_idle: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of its time that the learner waits, above which what it waits for grows."""
    scale_down_idle: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of its time that the learner waits, below which what piles up before it shrinks."""

    @model_validator(mode="after")
    def _leaves_a_gap(self) -> Self:
        if self.scale_down_idle >= self.scale_up_idle:
            raise ValueError(
                f"scale_down_idle {self.scale_down_idle:g} must be below scale_up_idle "
                f"{self.scale_up_idle:g}, or the fleet would flap"
            )
        return self


class SupervisionConfig(Table):
    """When a run gives up."""

    restarts_per_hour: Annotated[int, Field(ge=0)] = 10
    """Replacements of dead workers allowed per role and hour."""
    attempts: Annotated[int, Field(ge=1)] = 5
    """Attempts at a group before its task counts as failed."""
    max_untrained_batches: Annotated[int, Field(ge=1)] = 50
    """Batches' worth of groups that may leave one after another, failed or with nothing to
    teach, before the run gives up."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a worker which is scaled away gets to finish its groups; what is left then goes
    back and is generated elsewhere."""
    no_progress_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """A run in which nothing at all moves for so long ends; above learner.step_timeout_s."""
