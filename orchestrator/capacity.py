"""What a configuration needs against what the nodes of a cluster have.

Counts whole nodes, not what other jobs leave of them: Ray lets a run wait for those.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.check import resource_plan
from orchestrator.config import RunConfig

_UNINTERESTING = ("memory", "object_store_memory")
_NODES_NAMED = 8


@dataclass(frozen=True)
class Node:
    """One node of a cluster."""

    address: str
    resources: Mapping[str, float]
    """What it has in all, by Ray's names."""


def capacity_problems(config: RunConfig, nodes: Sequence[Node]) -> list[str]:
    """A paragraph for each resource that the nodes together lack, and for each role of which no
    node could hold a single actor."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node.resources)
    plan = resource_plan(config)
    problems: list[str] = []
    lacking = {name for name, need in plan.total.items() if need > total[name]}
    for name in sorted(lacking):
        roles = ", ".join(
            f"{role.role} {role.processes} x {role.each[name]:g}"
            for role in plan.roles
            if role.each.get(name)
        )
        problems.append(
            f"the cluster has {total[name]:g} {name} and the configuration needs "
            f"{plan.total[name]:g} ({roles}). {_advice(name)} The nodes: {_listed(nodes)}."
        )
    for role, bundle in _bundles(config):
        if lacking.isdisjoint(bundle) and not any(_fits(bundle, node) for node in nodes):
            problems.append(
                f"no node can hold one {role} actor, which needs {_spelled(bundle)} on one node. "
                f"The nodes: {_listed(nodes)}."
            )
    return problems


def _bundles(config: RunConfig) -> Iterator[tuple[str, dict[str, float]]]:
    """What has to be together on one node, by role."""
    for bundle in config.rollout.bundles():
        yield "rollout", {name: amount for name, amount in bundle.items() if amount}
    for role in resource_plan(config).roles:
        if role.role != "rollout" and role.each:
            yield role.role, dict(role.each)


def _fits(bundle: Mapping[str, float], node: Node) -> bool:
    return all(node.resources.get(name, 0.0) >= need for name, need in bundle.items())


def _advice(name: str) -> str:
    if name in ("CPU", "GPU"):
        return "Use fewer or smaller workers, or add nodes."
    return (
        f"Start nodes that have it (ray start --resources '{{\"{name}\": 1}}'), or change the "
        "resources table of the role."
    )


def _listed(nodes: Sequence[Node]) -> str:
    shown = [f"{node.address} {_spelled(_interesting(node))}" for node in nodes[:_NODES_NAMED]]
    more = len(nodes) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])]) or "none"


def _interesting(node: Node) -> dict[str, float]:
    return {
        name: amount
        for name, amount in sorted(node.resources.items())
        if name not in _UNINTERESTING and not name.startswith("node:")
    }


def _spelled(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
