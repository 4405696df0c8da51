"""A critic and a reference policy inside real learner groups: one gradient over ranks, the KL at
the start, and what a checkpoint brings back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from learner_groups import random_groups, save_tiny_model, spec, train, weights_of

from learner.group import LearnerDied, LearnerGroup
from learner.messages import ModelError

pytestmark = pytest.mark.integration

PPO = {
    "preset": "ppo",
    "kl": {"coefficient": 0.001, "place": "reward"},
    "critic": {"lam": 0.9, "value_clip": None},
}
KL_IN_LOSS = {"preset": "grpo", "kl": {"coefficient": 0.5}, "entropy_bonus": 0.01}
KL_IN_REWARD = {"preset": "rloo", "kl": {"coefficient": 0.5, "place": "reward"}}
CRITIC_RATE = {"optimizer": {"lr": 3e-3, "eps": 1e-4}}

Groups = dict[tuple[str, int], LearnerGroup]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(model: Path) -> Iterator[Groups]:
    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 << 20,
        )
    made = {
        (name, ranks): LearnerGroup(
            spec(model, ranks, objective, reference={}, value_model=CRITIC_RATE)
        )
        for name, objective in (("ppo", PPO), ("loss", KL_IN_LOSS), ("reward", KL_IN_REWARD))
        for ranks in (1, 2)
    }

    async def each(call: Any) -> None:
        await asyncio.gather(*(call(group) for group in made.values()))

    asyncio.run(each(lambda group: group.start()))
    yield made
    asyncio.run(each(lambda group: group.close()))
    if started:
        ray.shutdown()


@pytest.mark.parametrize("name", ["ppo", "loss", "reward"])
def test_ranks_share_one_gradient(groups: Groups, name: str) -> None:
    moves, results = {}, {}
    for ranks in (1, 2):
        group = groups[name, ranks]
        before = weights_of(group)
        # Twice: only then do reference and current policy differ, and does the critic know more.
        results[ranks] = [
            train(group, version, random_groups(seed=60 + version, version=version))
            for version in range(2)
        ]
        after = weights_of(group)
        moves[ranks] = torch.cat([(after[key] - before[key]).flatten() for key in before])
    assert moves[1].norm() > 0.1
    assert (moves[2] - moves[1]).norm() < 1e-4 * moves[1].norm()
    for one, two in zip(results[1], results[2], strict=True):
        assert one.changed and two.changed
        for key in ("loss", "grad_norm", *(("value_loss", "value_grad_norm") * (name == "ppo"))):
            assert two.metrics[key] == pytest.approx(one.metrics[key], rel=1e-4, abs=1e-7), key


def test_the_critic_learns_what_the_rewards_are(groups: Groups, tmp_path: Path) -> None:
    group = groups["ppo", 1]
    version = 2
    losses = []
    for _ in range(6):
        result = train(group, version, random_groups(seed=70, version=version))
        version = result.version
        losses.append(result.metrics["value_loss"])
    assert losses[-1] < losses[0]
    folder = tmp_path / f"step_{version}"
    asyncio.run(group.save(str(folder), keep=1, export=False))
    entries = random_groups(seed=71, version=version)
    first = train(group, version, entries)
    asyncio.run(group.load(str(folder)))
    again = train(group, version, entries)
    for key in ("loss", "value_loss", "grad_norm", "value_grad_norm"):
        assert again.metrics[key] == first.metrics[key], f"{key}: the critic was not restored"


def test_a_reference_that_is_another_model_is_not_judged_and_costs_kl(
    groups: Groups, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    home = save_tiny_model(tmp_path / "home")
    group = LearnerGroup(spec(home, 1, KL_IN_LOSS, reference={"path": str(other)}))
    try:
        asyncio.run(group.start())
        result = train(group, 0, random_groups(seed=80))
        assert result.metrics["kl"] > 1e-3
    finally:
        asyncio.run(group.close())


def test_the_kl_to_the_starting_policy_starts_at_zero(groups: Groups, tmp_path: Path) -> None:
    home = save_tiny_model(tmp_path / "home")
    group = LearnerGroup(spec(home, 1, KL_IN_LOSS, reference={}))
    try:
        asyncio.run(group.start())
        assert abs(train(group, 0, random_groups(seed=81)).metrics["kl"]) < 1e-6
    finally:
        asyncio.run(group.close())


def test_a_reference_that_does_not_load_is_named(groups: Groups, model: Path) -> None:
    group = LearnerGroup(spec(model, 1, KL_IN_LOSS, reference={"path": "/nowhere/at/all"}))
    with pytest.raises((ModelError, LearnerDied), match="/nowhere/at/all"):
        asyncio.run(group.start())
