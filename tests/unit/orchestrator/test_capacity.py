"""What a run needs against what nodes have."""

from pathlib import Path

from orchestrator.capacity import Node, capacity_problems
from orchestrator.config import RunConfig
from orchestrator.config_file import load

QUICKSTART = Path(__file__).parents[3] / "deploy/quickstart/quickstart.toml"


def config(*overrides: tuple[str, str]) -> RunConfig:
    return load(QUICKSTART, overrides)


def test_enough() -> None:
    assert capacity_problems(config(), [Node("10.0.0.1", {"CPU": 8.0})]) == []


def test_resources_that_are_nowhere_are_named_with_who_needs_them() -> None:
    wanted = config(("rollout.gpus", "1"), ("rollout.workers", "3"), ("learner.gpus", "1"))
    nodes = [Node("10.0.0.1", {"CPU": 8.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0})]
    (problem,) = capacity_problems(wanted, nodes)
    assert problem.startswith("the cluster has 2 GPU and the configuration needs 4")
    assert "(rollout 3 x 1, learner 1 x 1)" in problem
    assert "The nodes: 10.0.0.1 8 CPU, 2 GPU." in problem


def test_custom_resources_say_how_a_node_gets_them() -> None:
    (problem,) = capacity_problems(
        config(("learner.resources", "{ big = 1 }")), [Node("10.0.0.1", {"CPU": 8.0})]
    )
    assert """ray start --resources '{"big": 1}'""" in problem


def test_enough_in_all_and_no_node_for_one_actor() -> None:
    wanted = config(("learner.gpus", "1"), ("learner.resources", "{ big = 1 }"))
    nodes = [
        Node("10.0.0.1", {"CPU": 8.0, "GPU": 1.0}),
        Node("10.0.0.2", {"CPU": 8.0, "big": 1.0}),
    ]
    (problem,) = capacity_problems(wanted, nodes)
    assert problem.startswith("no node can hold one learner actor")


def test_many_nodes_are_not_all_listed() -> None:
    nodes = [Node(f"10.0.0.{i}", {"CPU": 1.0}) for i in range(20)]
    (problem,) = capacity_problems(config(("rollout.gpus", "1")), nodes)
    assert "and 12 more" in problem
