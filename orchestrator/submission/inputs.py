"""Whether what a configuration names will be there on the cluster.

A relative path has to lie in the package that is uploaded. An absolute one is a path of the
cluster's nodes, such as shared storage, about which nothing can be known from here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.check import missing_inputs
from orchestrator.config import RunConfig
from orchestrator.errors import Problem
from orchestrator.submission.package import Package


@dataclass(frozen=True)
class NamedPath:
    """A path that a configuration names."""

    key: str
    """Dotted key."""
    text: str
    """As it is written."""

    @property
    def on_cluster(self) -> bool:
        """Whether it is a path of the cluster's nodes and not of the package."""
        return self.text.startswith(("/", "~"))


def named_paths(raw: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Every path in a configuration as written; `raw` has been found valid."""
    yield NamedPath("model.path", raw["model"]["path"])
    for name in ("train", "held_out"):
        sources = raw["data"][name]
        for index, source in enumerate(sources if isinstance(sources, list) else [sources]):
            if "path" in source:
                several = isinstance(sources, list) and len(sources) > 1
                key = f"data.{name}.{index}.path" if several else f"data.{name}.path"
                yield NamedPath(key, source["path"])
    for name in ("tls_cert", "tls_key"):
        if text := raw.get("control", {}).get(name):
            yield NamedPath(f"control.{name}", text)


def cluster_paths(raw: Mapping[str, Any]) -> list[NamedPath]:
    """The paths that every node of the cluster has to have by itself."""
    return [path for path in named_paths(raw) if path.on_cluster]


def input_problems(
    raw: Mapping[str, Any], config: RunConfig, config_path: Path, package: Package
) -> list[Problem]:
    """What is missing here, would not get to the cluster, or would lie elsewhere there."""
    elsewhere = {path.key for path in cluster_paths(raw)}
    problems = [p for p in missing_inputs(config) if p.key not in elsewhere]
    missing = {problem.key for problem in problems}
    problems += _config_outside(config_path, package)
    for path in named_paths(raw):
        is_hub_name = path.key == "model.path" and not config.model.is_folder
        if path.key not in missing and not is_hub_name:
            problems += _not_sent(path, config_path.parent, package)
    return problems


def _config_outside(config_path: Path, package: Package) -> Iterator[Problem]:
    name = package.inside(config_path)
    if name is None:
        yield Problem(
            "",
            f"{config_path} lies outside of the working directory {package.folder}, which is all "
            "that the cluster gets",
            "a configuration inside of it; choose the folder with --working-dir",
        )
    elif not package.holds(name):
        yield Problem("", f"{config_path} is not uploaded: {_LEFT_OUT}")


_LEFT_OUT = (
    "a .gitignore or .rayignore, or what is always left out (runs, caches, environments), matches "
    "it. Change that, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 to have .gitignore ignored"
)


def _not_sent(path: NamedPath, folder: Path, package: Package) -> Iterator[Problem]:
    if path.on_cluster:
        if package.inside(Path(path.text).expanduser()) is not None:
            yield Problem(
                path.key,
                f"{path.text} is an absolute path into the working directory, whose copy lies "
                "elsewhere on the cluster",
                "a path relative to the configuration",
            )
        return
    name = package.inside(folder / path.text)
    if name is None:
        yield Problem(
            path.key,
            f"{path.text} leads out of the working directory {package.folder}, which is all that "
            "the cluster gets",
            "a path inside of it, or an absolute path on storage that all nodes mount",
        )
    elif not package.holds(name):
        yield Problem(path.key, f"{path.text} is not uploaded: {_LEFT_OUT}")
