"""What a configuration would do: resources by role, the objective in full, warnings.

Looks at files and counts; starts nothing and allocates nothing.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.config import RunConfig
from orchestrator.data_config import DataConfig, FileSource
from orchestrator.errors import ConfigError, Problem
from verifiers.registry import UnknownVerifierError, resolve

DATA_SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class RoleResources:
    """What Ray reserves for one role."""

    role: str
    processes: int
    """Ray actors."""
    each: Mapping[str, float]
    """Ray resources per actor, by Ray's names."""
    threads: int
    """Compute threads per actor."""
    note: str = ""

    @property
    def total(self) -> dict[str, float]:
        """Ray resources of all actors together."""
        return {name: amount * self.processes for name, amount in self.each.items()}


@dataclass(frozen=True)
class ResourcePlan:
    """All roles of a run."""

    roles: tuple[RoleResources, ...]

    @property
    def total(self) -> dict[str, float]:
        """Ray resources of all roles together."""
        total: Counter[str] = Counter()
        for role in self.roles:
            total.update(role.total)
        return dict(total)

    @property
    def threads(self) -> int:
        """Compute threads that may be busy at once; verifiers hardly compute."""
        return sum(role.processes * role.threads for role in self.roles)


def resource_plan(config: RunConfig) -> ResourcePlan:
    """Which role gets which resources."""
    rollout, verifiers, learner = config.rollout, config.verifiers, config.learner
    worker: Counter[str] = Counter()
    for bundle in rollout.bundles():
        worker.update(bundle)
    slots = rollout.max_groups_in_flight
    return ResourcePlan(
        (
            RoleResources(
                "rollout",
                rollout.workers,
                _amounts(worker),
                rollout.threads * rollout.engine.tensor_parallel_size,
                f"{slots} groups of {rollout.samples_per_group} at once each",
            ),
            RoleResources(
                "verifiers",
                verifiers.workers,
                _amounts({"CPU": verifiers.cpus, **verifiers.resources}),
                0,
                f"{verifiers.processes} killable processes each",
            ),
            RoleResources(
                "learner",
                learner.ranks,
                _amounts({"CPU": learner.cpus, "GPU": learner.gpus, **learner.resources}),
                learner.threads,
                f"{learner.param_dtype}, {learner.backend}",
            ),
            RoleResources("driver and trajectory store", 1, {}, 0, "on the driver's node"),
        )
    )


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if amount}


def missing_inputs(config: RunConfig) -> list[Problem]:
    """Files, folders and verifiers that the configuration names and that are not there."""
    return [*_missing_model(config), *_missing_data(config.data)]


def require_inputs(config: RunConfig, source: str) -> None:
    """Raise ConfigError, as of the file `source`, when something named is missing."""
    problems = missing_inputs(config)
    if problems:
        raise ConfigError(source, problems)


def _missing_model(config: RunConfig) -> Iterator[Problem]:
    folder = Path(config.model.path)
    if config.model.is_folder and not (folder / "config.json").is_file():
        yield Problem(
            "model.path",
            f"{folder} holds no config.json" if folder.is_dir() else f"there is no {folder}",
            "a model folder in Hugging Face layout, or a model-hub name",
        )


def _missing_data(data: DataConfig) -> Iterator[Problem]:
    for key, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        for index, source in enumerate(sources):
            where = key if len(sources) == 1 else f"{key}.{index}"
            if isinstance(source, FileSource):
                yield from _missing_in_source(source, where)


def _missing_in_source(source: FileSource, key: str) -> Iterator[Problem]:
    if source.path.suffix not in DATA_SUFFIXES:
        yield Problem(f"{key}.path", source.path.name, f"a name in {', '.join(DATA_SUFFIXES)}")
    elif not source.path.is_file():
        yield Problem(f"{key}.path", f"there is no {source.path}", "a file of tasks")
    if source.verifier is not None:
        try:
            resolve(source.verifier)
        except UnknownVerifierError as error:
            yield Problem(f"{key}.verifier", str(error))


def warnings(config: RunConfig, *, cores: int | None = None) -> list[str]:
    """Sentences about what is allowed and probably not meant.

    `cores` is the size of the one machine that everything would run on; None on a cluster.
    """
    plan = resource_plan(config)
    window = (1 + config.max_staleness) * config.groups_per_batch
    max_groups = config.queue.max_groups or window
    slots = config.rollout.workers * config.rollout.max_groups_in_flight
    notes = list(config.learner.warnings())
    if not config.model.is_folder:
        notes.append(
            f"model.path {config.model.path!r} is no folder beside the configuration, so it is "
            "taken for a model-hub name"
        )
    if cores is not None and plan.threads > cores:
        notes.append(
            f"{plan.threads} compute threads share {cores} cores of this machine; rollout "
            "workers and learner slow each other down"
        )
    if max_groups < window:
        notes.append(
            f"queue.max_groups {max_groups} is below the {window} groups that max_staleness "
            f"{config.max_staleness} allows on their way, so the queue is the tighter bound"
        )
    if slots > max_groups:
        notes.append(
            f"rollout workers can hold {slots} groups at once and only {max_groups} may be on "
            "their way: some slots always idle; use fewer workers, a smaller max_num_seqs, or a "
            "larger batch"
        )
    if config.learner.schedule.warmup_steps >= config.steps:
        notes.append("learner.schedule.warmup_steps is not below steps: the warm-up never ends")
    return notes


def local_cores() -> int | None:
    """Cores of this machine where a run would start its own Ray, None where it joins a cluster."""
    return None if os.environ.get("RAY_ADDRESS") else len(os.sched_getaffinity(0))


def show(config: RunConfig, console: Console) -> None:
    """Print the plan, the objective in full, the bounds of the flow, and the warnings."""
    console.print(f"{config.name}: {config.steps} steps on {config.model.path}", soft_wrap=True)
    console.print(_plan_table(resource_plan(config)))
    console.print(_pairs_table("flow", _flow_facts(config)))
    console.print(_pairs_table("objective", dict(_flat(objective_fields(config)))))
    for warning in warnings(config, cores=local_cores()):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)


def objective_fields(config: RunConfig) -> dict[str, Any]:
    """The objective with its preset expanded and the run's bounds filled in."""
    return config.resolved().learner.objective.model_dump(mode="json")


def _flow_facts(config: RunConfig) -> dict[str, object]:
    rollout, batch = config.rollout, config.groups_per_batch
    samples = batch * rollout.samples_per_group
    resolved = config.resolved()
    return {
        "one batch": f"{batch} groups, {samples} samples, at most "
        f"{samples * rollout.sampling.max_tokens} response tokens",
        "on their way": f"at most {resolved.queue.max_groups} groups, policy {config.queue.policy}",
        "longest prompt": f"{config.max_prompt_tokens or 'up to the model'} tokens",
        "training tasks": ", ".join(source.title for source in config.data.train),
        "held-out tasks": ", ".join(source.title for source in config.data.held_out),
    }


def _plan_table(plan: ResourcePlan) -> Table:
    table = Table("role", "actors", "each", "together", "threads", "", title_justify="left")
    for role in plan.roles:
        together = _spelled(role.total)
        threads = str(role.processes * role.threads)
        table.add_row(
            role.role, str(role.processes), _spelled(role.each), together, threads, role.note
        )
    table.add_section()
    actors = sum(role.processes for role in plan.roles) - 1
    table.add_row("all", str(actors), "", _spelled(plan.total), str(plan.threads), "")
    return table


def _pairs_table(title: str, pairs: Mapping[str, object]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in pairs.items():
        table.add_row(key, str(value))
    return table


def _spelled(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "-"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, "-" if value is None else value
