"""What `status` says in one screen."""

import io
from dataclasses import replace

from rich.console import Console
from steering_double import STATUS, STEP

from orchestrator.control.view import bottleneck, duration, plain, screen
from orchestrator.steering import Activity, RunState


def test_the_bottleneck_comes_first_with_its_evidence() -> None:
    lines = plain(STATUS).splitlines()
    assert lines[0] == "tiny  training  step 12/100  version 11  up 3 min 20 s"
    assert lines[1] == "bottleneck  rollout: learner waited 75 %"
    assert lines[2].startswith("warning     engine mismatch rises")
    assert len(lines) <= 24


def test_the_screen_tells_where_everything_is() -> None:
    said = plain(STATUS)
    for words in (
        "step 12     4.0 s: wait_for_groups 3.0 s (75 %), train 1.0 s (25 %)",
        "reward 0.50, accuracy 0.25, lag 0.33, 38 trained tokens/s",
        "1 of 16 samples without a verdict",
        "3 groups ready, oldest waits 4 s; 4 of 4 slots generating, 2 being scored, 9 under way "
        "(1 to be tried again); 3.0 of 64 MiB",
        "rollout     target 2: 1 ready, 1 starting, 0 draining, serving version 11, 1 restarts",
        "verifier    target 1: 1 ready",
        "limits      max_staleness 2, max_groups 16",
        "ledger      balanced: 200 generated, 190 trained, 10 pending, 0 failed_tasks",
        "held-out accuracy 41.0%, checkpoint of step 10",
    ):
        assert words in said


def test_a_run_without_a_step_or_at_rest_has_no_bottleneck() -> None:
    fresh = replace(STATUS, last_step=None, held_out_accuracy=None, checkpoint_step=None)
    assert "no step is done" in bottleneck(fresh)
    assert "not evaluated yet, no checkpoint yet" in plain(fresh)
    paused = replace(STATUS, paused=frozenset(Activity))
    assert bottleneck(paused).startswith("none: generation and training paused")
    assert "stopping" in bottleneck(replace(STATUS, state=RunState.STOPPING))


def test_faults_stand_out() -> None:
    broken = replace(STATUS, balanced=False, last_step=replace(STEP, skipped="non-finite loss"))
    assert "DOES NOT ADD UP" in plain(broken)
    assert "skipped: non-finite loss" in plain(broken)


def test_a_terminal_gets_the_same_words_with_markup_taken_literally() -> None:
    out = io.StringIO()
    tricky = replace(STATUS, warnings=("look at [red]this[/red]",))
    Console(file=out, force_terminal=True, width=100, color_system=None).print(screen(tricky))
    said = out.getvalue()
    assert "look at [red]this[/red]" in said
    assert said.index("learner waited 75 %") < said.index("queue")
    assert len(said.splitlines()) <= 24


def test_durations() -> None:
    assert [duration(s) for s in (-1, 59.4, 60, 7500)] == ["0 s", "59 s", "1 min 0 s", "2 h 5 min"]
