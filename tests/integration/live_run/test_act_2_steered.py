"""Act 2: the live run is scaled, paused, bounded, saved and evaluated from outside."""

import json

import pytest
from play import Play, even, fleet

from orchestrator.errors import UsageError
from orchestrator.steering import Activity, Role, RunState

pytestmark = pytest.mark.integration


def test_status_is_one_coherent_snapshot(play: Play) -> None:
    status = play.client.status()
    assert status.state is RunState.TRAINING
    assert even(status, Role.ROLLOUT, 1) and even(status, Role.VERIFIER, 1)
    assert fleet(status, Role.LEARNER).count("ready") == 1
    assert all(w.pid and w.node for f in status.fleets for w in f.workers)
    assert status.balanced
    ended = sum(status.samples[fate] for fate in ("trained", "masked", "dropped", "superseded"))
    assert status.samples["generated"] == ended + status.samples["pending"]
    assert status.last_step is not None and status.last_step.bottleneck.evidence


def test_a_second_rollout_worker_joins_at_the_current_version(play: Play) -> None:
    assert play.command("scale", "--rollout", "2").returncode == 0
    status = play.until(lambda s: even(s, Role.ROLLOUT, 2), "with two rollout workers")
    newcomer = fleet(status, Role.ROLLOUT).workers[-1]
    assert newcomer.name == "rollout-1"
    assert newcomer.version is not None
    assert status.version - newcomer.version <= status.limits.max_staleness
    later = play.until(
        lambda s: fleet(s, Role.ROLLOUT).workers[-1].in_flight > 0, "working with the newcomer"
    )
    assert later.step >= status.step


def test_verifier_workers_scale_by_themselves(play: Play) -> None:
    play.client.scale(Role.VERIFIER, 2)
    status = play.until(lambda s: even(s, Role.VERIFIER, 2), "with two verifier workers")
    assert even(status, Role.ROLLOUT, 2)
    play.client.scale(Role.VERIFIER, 1)
    play.until(lambda s: even(s, Role.VERIFIER, 1), "with one verifier worker again")


def test_paused_training_stands_still_and_goes_on(play: Play) -> None:
    assert play.command("pause", "training").returncode == 0
    held = play.until(
        lambda s: (
            Activity.TRAINING in s.paused
            and s.queue.generating_groups == 0
            and s.queue.verifying_groups == 0
        ),
        "full and standing still",
    )
    assert play.client.checkpoint().step >= held.step
    again = play.client.status()
    assert again.step == play.client.status().step
    assert play.command("resume", "training").returncode == 0
    play.until(lambda s: s.step > again.step, "training again")


def test_paused_generation_starves_the_learner_and_goes_on(play: Play) -> None:
    play.client.pause(Activity.GENERATION)
    dry = play.until(
        lambda s: s.queue.generating_groups == 0 and s.queue.verifying_groups == 0, "dry"
    )
    assert dry.samples["generated"] == play.client.status().samples["generated"]
    play.client.resume(Activity.GENERATION)
    play.until(lambda s: s.step > dry.step, "training again")


def test_a_lowered_staleness_bound_holds_from_the_next_step_on(play: Play) -> None:
    limits = play.client.set_limits(max_staleness=0)
    assert (limits.max_staleness, limits.max_groups) == (0, 16)
    begun = play.client.status().step + 1
    last = play.more_steps(3).step
    assert play.client.set_limits(max_staleness=3).max_groups == 64
    play.more_steps(3)
    for record in play.run.steps():
        if begun < record["step"] <= last:
            assert record["staleness_max"] in (0, None), record


def test_checkpoint_and_evaluation_on_demand(play: Play) -> None:
    done = play.client.checkpoint()
    folder = play.run.directory / f"checkpoints/step_{done.step}"
    assert str(folder) == done.path and (folder / "hf/config.json").is_file()
    answer = play.command("evaluate")
    assert answer.returncode == 0 and "%" in answer.stdout
    records = (play.run.directory / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "evaluation" for line in records) == 2


def test_a_worker_scaled_away_finishes_what_it_has(play: Play) -> None:
    before = play.client.status()
    play.client.scale(Role.ROLLOUT, 1)
    status = play.until(lambda s: even(s, Role.ROLLOUT, 1), "with one rollout worker again")
    assert status.samples["superseded"] == before.samples["superseded"], "nothing was redone"
    assert status.samples["failed_tasks"] == 0
    assert fleet(status, Role.ROLLOUT).restarts == 0
    play.more_steps(2)


def test_what_cannot_be_is_refused_with_a_sentence(play: Play) -> None:
    for words, expected in (
        (("scale", "--rollout", "0"), "pause generation"),
        (("limits", "--max-groups", "3"), "can never hold a batch"),
        (("limits", "--max-staleness", "65"), "expected 0 to 64"),
    ):
        answer = play.command(*words)
        assert answer.returncode != 0
        assert expected in answer.stderr
        assert "Traceback" not in answer.stderr
    with pytest.raises(UsageError, match="learner ranks cannot"):
        play.client.scale(Role.LEARNER, 2)


def test_status_fits_one_screen_and_names_the_bottleneck(play: Play) -> None:
    answer = play.command("status")
    assert answer.returncode == 0
    assert "bottleneck" in answer.stdout
    assert len(answer.stdout.splitlines()) <= 50
    told = json.loads(play.command("status", "--json").stdout)
    assert told["run"] == play.run.directory.name


def test_the_token_is_nowhere_but_in_its_file(play: Play) -> None:
    token = json.loads((play.run.directory / "control.json").read_text())["token"]
    assert len(token) >= 32
    holders = [
        path.name
        for path in play.run.directory.rglob("*")
        if path.is_file() and token.encode() in path.read_bytes()
    ]
    assert holders == ["control.json"]
    assert token not in play.run.output
