"""What passes between the driver and a rollout worker, apart from trajectories and weights."""

from dataclasses import dataclass

from actors.parity import ParityReport
from actors.trajectory import WeightLabel


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to generate: `n` samples of one task. Sample i is seeded by `seed + i`."""

    group_id: int
    task_id: str
    prompt_ids: tuple[int, ...]
    n: int
    attempt: int = 0
    seed: int | None = None
    temperature: float | None = None
    """None for the configured one, which is the only one that may be trained on."""


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """What became of a group. `label` served at its dispatch; times are unix seconds."""

    group_id: int
    attempt: int
    ok: bool
    label: str
    started_at: float
    finished_at: float
    error: str = ""
    samples: int = 0
    response_tokens: tuple[int, ...] = ()
    """length of each sample"""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is ready to generate."""

    name: str
    node_id: str
    pid: int
    engine_pids: tuple[int, ...]
    max_groups_in_flight: int
    label: WeightLabel
    dtype: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One weight sync. `label` is what the engine serves now; `superseded` tells that newer
    weights were asked for meanwhile, so these were not loaded. `parity` is None without a probe.
    """

    label: WeightLabel
    superseded: bool = False
    stage_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    probe_s: float = 0.0
    next_token_s: float | None = None
    """From the pause to the first token after it, where one came before this report."""
    nbytes: int = 0
    parity: ParityReport | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Counters that a supervisor compares between two looks."""

    tokens_generated: int
    groups_in_flight: int
    label: WeightLabel
    paused: bool
