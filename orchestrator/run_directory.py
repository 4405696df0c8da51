"""The folder that holds everything a run leaves behind.

Knows names and layout, not what the files mean. Files are replaced whole, so that a reader or a
crash never sees half of one.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from learner.layout import finished_steps
from orchestrator.errors import RunError, UsageError
from orchestrator.records import finite_or_none

LATEST = "latest"
TARGETS = "targets"
LOCK = ".lock"


@dataclass(frozen=True)
class RunDirectory:
    """`runs/<name>-<UTC time>/`, and the paths inside it."""

    path: Path

    @classmethod
    def create(cls, runs_folder: Path, name: str, now: datetime | None = None) -> Self:
        """Make a new directory for run `name` and let `runs/latest` point to it.

        Two runs of one name in one second get different directories.
        """
        moment = (now or datetime.now(UTC)).astimezone(UTC)
        stem = f"{name}-{moment:%Y%m%dT%H%M%SZ}"
        try:
            runs_folder.mkdir(parents=True, exist_ok=True)
            run = cls(_make_unique(runs_folder, stem))
            for folder in (run.checkpoints, run.trajectories, run.logs):
                folder.mkdir()
        except OSError as error:
            raise RunError(
                f"cannot make a run directory in {runs_folder}: {error.strerror}. "
                "Choose a writable folder with --runs-folder."
            ) from error
        run.point_latest()
        return run

    @classmethod
    def find(cls, runs_folder: Path, reference: str = LATEST) -> Self:
        """The existing run that `reference` names: a path, or a name inside `runs_folder`.

        Raises UsageError when neither is the directory of a run.
        """
        for candidate in (Path(reference), runs_folder / reference):
            if (candidate / "config.json").is_file():
                return cls(candidate.resolve())
        existing = _existing(runs_folder)
        if reference == LATEST and not existing:
            raise UsageError(
                f"no run is in {runs_folder} yet. Start one with `slipstream run CONFIG`, go to "
                "the folder in which it was started, or name its directory; one that was just "
                "started needs some seconds."
            )
        raise UsageError(
            f"no run at {reference!r}, nor in {runs_folder}; expected the directory of a run, "
            f"which holds a config.json.{existing}"
        )

    @property
    def config_json(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def summary_json(self) -> Path:
        """The result, written when the run ends."""
        return self.path / "summary.json"

    @property
    def metrics_jsonl(self) -> Path:
        """One JSON object per step, evaluation and event."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step_N` checkpoints."""
        return self.path / "checkpoints"

    @property
    def ledger(self) -> Path:
        """The ledger's journal."""
        return self.path / "ledger.sqlite"

    @property
    def trajectories(self) -> Path:
        """Folder of the trajectory log."""
        return self.path / "trajectories"

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self.path / "logs"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after `step` batch steps."""
        return self.checkpoints / f"step_{step}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the finished checkpoints, lowest first."""
        return finished_steps(self.checkpoints)

    def set_aside_after(self, step: int) -> None:
        """Make checkpoints beyond `step` none: of a history that the ledger has lost, as after a
        power failure."""
        for number in self.checkpoint_steps():
            if number > step:
                path = self.checkpoint(number)
                path.rename(path.with_name(f"lost_{path.name}"))

    def lock(self) -> None:
        """Let this process be the only one that runs in here, for as long as it lives.

        Raises RunError when another process does.
        """
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode().strip()
            os.close(handle)
            raise RunError(
                f"{self.path} is being run by process {owner or '?'}: stop that one first, with "
                "`slipstream stop` for example."
            ) from None
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        # The handle stays open on purpose: the lock ends with the process.

    def next_lineage(self) -> int:
        """A number that no earlier resume or recovery of this run has had; a run begins with 0."""
        path = self.path / "lineage.json"
        last = json.loads(path.read_text())["lineage"] if path.is_file() else 0
        write_json(path, {"lineage": last + 1})
        return last + 1

    def read_config(self) -> dict[str, Any]:
        """The configuration that the run was last started with."""
        content: dict[str, Any] = json.loads(self.config_json.read_text(encoding="utf-8"))
        return content

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Keep the resolved configuration, such that it can be read as one again."""
        write_json(self.config_json, config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the result; what JSON cannot say is null."""
        write_json(self.summary_json, finite_or_none(summary))

    def write_targets(self, addresses: Sequence[str]) -> None:
        """Where Prometheus scrapes this run, as its file discovery reads it; nowhere at the end.

        Discovery takes a wildcard in a file's name only, so all runs of a folder that are live also
        have a file each in its `targets`.
        """
        labels = {"run": self.path.name}
        found = [{"targets": list(addresses), "labels": labels}] if addresses else []
        write_json(self.path / "prometheus_targets.json", found)
        shared = self.path.parent / TARGETS / f"{self.path.name}.json"
        if found:
            shared.parent.mkdir(exist_ok=True)
            self._remove_stale_targets()
            write_json(shared, found)
        else:
            shared.unlink(missing_ok=True)

    def _remove_stale_targets(self) -> None:
        """Runs that were killed are targets until the next one begins, so that it is noticed."""
        for file in (self.path.parent / TARGETS).glob("*.json"):
            if not RunDirectory(self.path.parent / file.stem).is_live():
                file.unlink(missing_ok=True)

    def is_live(self) -> bool:
        """Whether a process runs in here."""
        try:
            handle = os.open(self.path / LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def point_latest(self) -> None:
        """Let `latest`, beside this directory, point here; a reader sees the old or the new."""
        link = self.path.parent / LATEST
        temporary = link.with_name(f".{LATEST}-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name, target_is_directory=True)
        try:
            temporary.replace(link)
        except OSError as error:
            temporary.unlink()
            raise RunError(
                f"cannot make {link} a link to the newest run: {error.strerror}. "
                "It must be a link or absent; move what is there away."
            ) from error


def write_json(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Replace `path` by `content` as JSON in one atomic step. Raises ValueError on NaN."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def _make_unique(folder: Path, stem: str) -> Path:
    number = 1
    while True:
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path.resolve()


def _existing(runs_folder: Path) -> str:
    """A sentence that names the newest runs there, if any."""
    found = sorted(
        (c.parent for c in runs_folder.glob("*/config.json") if not c.parent.is_symlink()),
        key=lambda run: run.stat().st_mtime,
        reverse=True,
    )
    return f" Newest there: {', '.join(run.name for run in found[:3])}." if found else ""
