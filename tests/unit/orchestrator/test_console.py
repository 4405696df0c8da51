"""Which stage held a step up, and the lines that say so."""

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from orchestrator.bottleneck import FlowGauges, Phase, Stage, find_bottleneck
from orchestrator.console import Console, step_line
from orchestrator.records import StepRecord

WAITING = {Phase.WAIT_FOR_GROUPS: 0.61, Phase.TRAIN: 0.29, Phase.PUBLISH: 0.1}


def record(**fields: object) -> StepRecord:
    base: dict[str, object] = {
        "step": 12,
        "steps": 60,
        "version": 11,
        "phase_seconds": WAITING,
        "gauges": FlowGauges(generating_groups=6, verifying_groups=1),
        "reward": 0.381,
        "accuracy": 0.41,
        "staleness_tokens": {0: 100, 1: 400, 2: 312},
        "samples": 200,
        "response_tokens": 820,
    }
    return StepRecord(**{**base, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phases", "gauges", "stage", "says"),
    [
        (WAITING, FlowGauges(generating_groups=6, verifying_groups=1), Stage.ROLLOUT, "61 %"),
        (
            WAITING,
            FlowGauges(generating_groups=2, verifying_groups=9),
            Stage.VERIFIERS,
            "9 groups being scored, 2 generating",
        ),
        (
            WAITING,
            FlowGauges(generating_groups=4, admission_blocked_share=0.7),
            Stage.ADMISSION,
            "staleness bound; learner waited 61 %, free slots refused 70 % of the time",
        ),
        (WAITING, FlowGauges(sync_paused_share=0.6), Stage.WEIGHT_SYNC, "paused to load 60 %"),
        (
            {Phase.WAIT_FOR_GROUPS: 0.1, Phase.SCORE: 0.2, Phase.TRAIN: 0.6, Phase.PUBLISH: 0.1},
            FlowGauges(verifying_groups=50, admission_blocked_share=1),
            Stage.LEARNER,
            "busy 80 %, mostly train",
        ),
        (
            {Phase.WAIT_FOR_GROUPS: 0.1, Phase.TRAIN: 0.2, Phase.CHECKPOINT: 0.7},
            FlowGauges(),
            Stage.LEARNER,
            "mostly checkpoint",
        ),
        (
            {Phase.WAIT_FOR_GROUPS: 0.2, Phase.TRAIN: 0.3, Phase.PUBLISH: 0.5},
            FlowGauges(),
            Stage.WEIGHT_SYNC,
            "publishing took 50 %",
        ),
        ({}, FlowGauges(), Stage.LEARNER, "no time measured"),
    ],
)
def test_bottleneck_is_named_with_its_evidence(
    phases: dict[Phase, float], gauges: FlowGauges, stage: Stage, says: str
) -> None:
    found = find_bottleneck(phases, gauges)
    assert found.stage is stage
    assert says in found.evidence


def test_step_line() -> None:
    assert step_line(record()) == (
        "step 12/60  acc 0.41  reward 0.38  lag 1.3  len 4.1  tok/s 812  step 1.0s  "
        "bottleneck: rollout (learner waited 61 %)"
    )


def test_step_line_of_a_skipped_step_without_figures() -> None:
    line = step_line(
        record(
            step=3,
            skipped="empty",
            reward=None,
            accuracy=None,
            staleness_tokens={},
            samples=0,
            phase_seconds={},
        )
    )
    assert line.startswith("step  3/60  SKIPPED: empty  acc -  reward -  lag -  len -  tok/s 0 ")


def test_console_writes_one_line_per_step_and_the_final_table() -> None:
    out = io.StringIO()
    console = Console(RichConsole(file=out, width=60, highlight=False))
    console.evaluation("before", 0.3125, 64)
    console.step(record())
    console.summary(
        {"accuracy_before": 0.3125, "accuracy_after": 0.5, "steps": 60, "staleness_max": None},
        title="runs/[tiny]",
    )
    lines = out.getvalue().splitlines()
    assert lines[0] == "held-out accuracy before: 31.2% of 64 samples"
    assert lines[1] == step_line(record())
    text = "\n".join(lines[2:])
    assert "runs/[tiny]" in text
    assert "50.0%" in text
    assert "staleness, largest" not in text


def test_a_failure_shows_the_last_lines_of_the_culprit_s_log(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)) + "Killed [red]\n")
    out = io.StringIO()
    Console(RichConsole(file=out, width=200, highlight=False)).log_tail(log)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("the last lines of") and lines[0].endswith("rollout-0.log:")
    assert lines[-2:] == ["  | line 99", "  | Killed [red]"]
    assert len(lines) == 13


def test_a_log_that_is_empty_or_elsewhere_is_said_to_be(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(RichConsole(file=out, width=200))
    (tmp_path / "empty.log").touch()
    console.log_tail(tmp_path / "empty.log")
    console.log_tail(tmp_path / "on-another-node.log")
    assert out.getvalue().splitlines() == [
        f"{tmp_path}/empty.log is empty",
        "on-another-node.log is not on this machine",
    ]
