"""Prometheus series and the JSON-lines record of a run."""

import json
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from steering_double import STATUS

from orchestrator.bottleneck import FlowGauges, Phase
from orchestrator.errors import RunError
from orchestrator.metrics import Metrics
from orchestrator.records import JsonLines, StepRecord
from orchestrator.steering import Activity
from orchestrator.workers import LossReason

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Parity:
    max_abs: float
    passed: bool


@dataclass
class Sync:
    """The figures of a worker's sync report, without the engine behind them."""

    stage_s: float = 0.2
    pause_s: float = 0.05
    load_s: float = 0.3
    probe_s: float = 0.1
    next_token_s: float | None = None
    parity: Parity | None = None


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics(run="tiny-1", model="/m", objective="dapo", verifiers=["exact", "math"])
    yield metrics
    metrics.close()


def scrape(metrics: Metrics) -> Series:
    """All series, as the endpoint writes them."""
    return series_in(generate_latest(metrics.registry).decode())


def series_in(text: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"slipstream_{name}", frozenset(labels.items())]


def record(**fields: object) -> StepRecord:
    base: dict[str, object] = {
        "step": 3,
        "steps": 60,
        "version": 2,
        "phase_seconds": {Phase.WAIT_FOR_GROUPS: 3.0, Phase.TRAIN: 1.0},
        "gauges": FlowGauges(queue_groups=5, queue_capacity_groups=12, generating_groups=4),
        "reward": 0.5,
        "accuracy": 0.25,
        "staleness_tokens": {0: 60, 2: 20},
        "masked_tokens": {"stale": 10},
        "samples": 10,
        "response_tokens": 90,
        "learner": {"entropy": 1.5, "something_new": 3.0},
    }
    return StepRecord(**{**base, **fields})  # type: ignore[arg-type]


def test_every_series_is_there_at_zero_before_the_first_step(metrics: Metrics) -> None:
    before = scrape(metrics)
    assert value(before, "run_info", run="tiny-1", model="/m", objective="dapo") == 1
    for name, labels in (
        ("trained_tokens_total", {"staleness": "2"}),
        ("masked_tokens_total", {"reason": "stale"}),
        ("samples_total", {"fate": "superseded"}),
        ("workers", {"role": "rollout", "state": "quarantined"}),
        ("syncs_total", {"outcome": "quarantined"}),
        ("phase_seconds_total", {"phase": "publish"}),
        ("bottleneck", {"stage": "admission"}),
        ("sync_seconds_count", {"stage": "load"}),
        ("batches_total", {"outcome": "non-finite"}),
    ):
        assert value(before, name, **labels) == 0
    metrics.observe_step(record())
    metrics.observe_sync(Sync())  # type: ignore[arg-type]
    metrics.observe_status(STATUS)
    metrics.observe_verdicts("unheard_of", {"ok": 1}, [0.1])
    metrics.observe_fates(samples={}, groups={}, dropped_samples={"no_such_reason": 3})
    metrics.observe_step(record(staleness_tokens={64: 5}, masked_tokens={"no_such": 1}))
    assert scrape(metrics).keys() == before.keys()  # labels are bounded


def test_names_follow_prometheus_practice(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert family.name.startswith("slipstream_")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            if family.type == "counter":
                assert sample.name.endswith("_total")


def test_a_step_reaches_every_series_it_concerns(metrics: Metrics) -> None:
    metrics.observe_step(record())
    metrics.observe_flow(record().gauges)
    metrics.observe_step(record(step=4, skipped="empty", reward=None, staleness_tokens={}))
    after = scrape(metrics)
    assert value(after, "step") == 4
    assert value(after, "planned_steps") == 60
    assert value(after, "policy_version") == 2
    assert value(after, "batches_total", outcome="trained") == 1
    assert value(after, "batches_total", outcome="empty") == 1
    assert value(after, "phase_seconds_total", phase="wait_for_groups") == 6
    assert value(after, "step_seconds_sum") == 8
    assert value(after, "trained_tokens_total", staleness="0") == 60
    assert value(after, "trained_tokens_total", staleness="2") == 20
    assert value(after, "masked_tokens_total", reason="stale") == 20
    assert value(after, "reward_mean") == 0.5
    assert value(after, "entropy_nats") == 1.5
    assert value(after, "queue_groups") == 5
    stages = {stage: v for (name, stage), v in after.items() if name == "slipstream_bottleneck"}
    assert sum(stages.values()) == 1
    assert stages[frozenset({("stage", "rollout")})] == 1


def test_running_totals_become_counters(metrics: Metrics) -> None:
    metrics.observe_fates(samples={"generated": 10}, groups={"admitted": 3})
    metrics.observe_fates(
        samples={"generated": 16}, groups={"admitted": 4}, dropped_samples={"stale": 8}
    )
    metrics.observe_fates(samples={"generated": 12}, groups={})  # a total that fell back
    metrics.observe_fates(samples={"generated": 13}, groups={})
    metrics.observe_restarts("verifier", {LossReason.DIED: 3})
    metrics.observe_restarts("verifier", {LossReason.DIED: 3})
    after = scrape(metrics)
    assert value(after, "samples_total", fate="generated") == 17
    assert value(after, "groups_total", fate="admitted") == 4
    assert value(after, "dropped_samples_total", reason="stale") == 8
    assert value(after, "worker_restarts_total", role="verifier", reason="died") == 3


def test_a_snapshot_tells_states_targets_and_bounds(metrics: Metrics) -> None:
    metrics.observe_status(STATUS)
    after = scrape(metrics)
    assert value(after, "run_state", state="training") == 1
    assert value(after, "run_state", state="starting") == 0
    assert value(after, "paused", activity="training") == (Activity.TRAINING in STATUS.paused)
    assert value(after, "max_staleness") == STATUS.limits.max_staleness
    assert value(after, "queue_oldest_seconds") == STATUS.queue.oldest_age_s
    for fleet in STATUS.fleets:
        assert value(after, "workers_target", role=fleet.role) == fleet.target
        ready = value(after, "workers", role=fleet.role, state="ready")
        assert ready == fleet.count("ready")


def test_verdicts_are_counted_by_verifier_and_status(metrics: Metrics) -> None:
    metrics.observe_verdicts("math", {"ok": 3, "timeout": 1}, [0.01, 0.02, 0.03, 10.0])
    metrics.observe_verdicts("mine:Own", {"error": 2}, [0.5, 0.5])
    after = scrape(metrics)
    assert value(after, "verdicts_total", verifier="math", status="timeout") == 1
    assert value(after, "verdicts_total", verifier="other", status="error") == 2
    assert value(after, "verdict_seconds_count", verifier="math") == 4


def test_a_checkpoint_says_when_and_how_long(metrics: Metrics) -> None:
    metrics.observe_failed_checkpoint()
    metrics.observe_checkpoint(step=12, seconds=3.5)
    after = scrape(metrics)
    assert value(after, "checkpoint_step") == 12
    assert value(after, "checkpoints_total", outcome="failed") == 1
    assert value(after, "checkpoint_seconds_sum") == 3.5
    assert value(after, "last_checkpoint_time_seconds") > 1e9


def test_syncs_are_counted_by_outcome_and_timed_by_stage(metrics: Metrics) -> None:
    metrics.observe_publish(0.4, 1000)
    metrics.observe_sync(Sync(parity=Parity(2e-5, True)))  # type: ignore[arg-type]
    metrics.observe_sync(Sync(parity=Parity(0.5, False)))  # type: ignore[arg-type]
    after = scrape(metrics)
    assert value(after, "syncs_total", outcome="ok") == 1
    assert value(after, "syncs_total", outcome="quarantined") == 1
    assert value(after, "sync_seconds_sum", stage="publish") == 0.4
    assert value(after, "sync_seconds_sum", stage="load") == 0.6
    assert value(after, "published_bytes_total") == 1000
    assert value(after, "parity_max_abs") == 0.5


def test_the_endpoint_serves_what_the_registry_holds(metrics: Metrics) -> None:
    metrics.observe_step(record())
    address = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert series_in(answer.read().decode()) == scrape(metrics)


def test_a_taken_port_is_an_error_with_advice(metrics: Metrics) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"metrics\.port"):
            metrics.serve("127.0.0.1", taken.getsockname()[1])


def test_figures_of_a_record() -> None:
    line = record().as_json()
    assert line["staleness_mean"] == 0.5
    assert line["staleness_max"] == 2
    assert line["trained_tokens_per_second"] == 20
    assert line["response_tokens_mean"] == 9
    assert line["bottleneck"] == "rollout"
    empty = record(staleness_tokens={1: 0}, samples=0).as_json()
    assert empty["staleness_mean"] is None
    assert empty["staleness_max"] is None
    assert empty["response_tokens_mean"] is None


def test_json_lines_are_readable_at_once_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write(record(learner={"grad_norm": float("nan")}).as_json())
        written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert written["kind"] == "step"
    assert written["learner"] == {"grad_norm": None}
    assert written["phase_seconds"] == {"wait_for_groups": 3.0, "train": 1.0}


def test_a_torn_last_line_is_removed_before_appending(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    with JsonLines(path) as lines:
        lines.write({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
