"""A run as a Ray job: its entrypoint and environment, following its log, and how it ended."""

import asyncio
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, RunError
from orchestrator.operation_config import NODE_HOST
from orchestrator.submission.package import EXCLUDES, Package

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

DEFAULT_RUNS_FOLDER = "~/slipstream-runs"
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_S = 600
RECONNECTS = 20
POLL_S = 1.0
COMMAND_NOT_FOUND = 127


def entrypoint(
    config: str,
    raw: Mapping[str, Any],
    overrides: Sequence[tuple[str, str]],
    *,
    runs_folder: str = DEFAULT_RUNS_FOLDER,
    resume: str | None = None,
) -> str:
    """The shell command of the driver.

    `config` is relative to the working directory. The control service and the metrics bind the
    node's address, where others of the cluster reach them, unless `raw` chooses another.
    """
    words = ["exec", "python", "-m", "orchestrator.cli", "run", shlex.quote(config)]
    words += ["--runs-folder", _in_shell(runs_folder)]
    if resume is not None:
        words.append(shlex.quote(f"--resume={resume}"))
    hosts = [
        (f"{table}.host", NODE_HOST)
        for table in ("control", "metrics")
        if "host" not in raw.get(table, {})
    ]
    words += [shlex.quote(f"--{key}={value}") for key, value in [*overrides, *hosts]]
    return " ".join(words)


def _in_shell(folder: str) -> str:
    """`folder` as one word of a shell, a leading `~` being the home of whoever runs the job."""
    if folder == "~" or folder.startswith("~/"):
        rest = folder.removeprefix("~")
        return f'"$HOME"{shlex.quote(rest) if rest else ""}'
    return shlex.quote(folder)


def runtime_environment(package: Package, environment: Mapping[str, str]) -> dict[str, Any]:
    """Ray's runtime environment: the package, and how long a run may take to stop.

    No token goes along: whoever sees the dashboard reads it. The run makes one of its own, which
    its named actor tells those with access to the cluster.

    `ray job stop` kills a driver 3 s after it asked it to end; a run needs longer than that to
    finish its step and save.
    """
    variables = {STOP_WAIT_VARIABLE: environment.get(STOP_WAIT_VARIABLE, str(STOP_WAIT_S))}
    return {
        "working_dir": str(package.folder),
        "excludes": list(EXCLUDES),
        "env_vars": variables,
    }


def connect(url: str) -> "JobSubmissionClient":
    """Ray's client of the dashboard at `url`, which has been found to answer."""
    from ray.job_submission import JobSubmissionClient

    for name in (
        "ray.dashboard.modules.dashboard_sdk",
        "ray.dashboard.modules.job.sdk",
        "ray._private.runtime_env.working_dir",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    return JobSubmissionClient(url)


def follow(
    client: "JobSubmissionClient", job_id: str, write: Callable[[str], object]
) -> "JobDetails":
    """Write the job's log until the job has ended; what Ray knows about it then.

    Takes up the thread where it was after a broken connection. Raises RunError when the cluster
    stays away; the job does not notice.
    """
    return asyncio.run(_follow(client, job_id, write))


async def _follow(
    client: "JobSubmissionClient", job_id: str, write: Callable[[str], object]
) -> "JobDetails":
    from aiohttp import ClientError
    from requests import RequestException

    log = LogWriter(write)
    failures = 0
    while True:
        try:
            log.rewind()
            async for chunk in client.tail_job_logs(job_id):
                log.feed(chunk)
                failures = 0
            details = client.get_job_info(job_id)
            if details.status.is_terminal():
                return details
        except (ClientError, RequestException, RuntimeError, OSError) as error:
            failures += 1
            if failures > RECONNECTS:
                raise RunError(
                    f"the cluster does not answer any more: {error}. The job may go on without "
                    f"us: `ray job logs --follow {job_id}` takes up its log."
                ) from error
        await asyncio.sleep(POLL_S)


class LogWriter:
    """Writes a log that may be sent again from its beginning, each character once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._written = 0
        self._position = 0

    def rewind(self) -> None:
        """What is fed next is the beginning of the log again."""
        self._position = 0

    def feed(self, chunk: str) -> None:
        """Write what of `chunk` is new."""
        start = self._position
        self._position += len(chunk)
        if self._position > self._written:
            self._write(chunk[max(self._written - start, 0) :])
            self._written = self._position


def exit_code(status: str, driver_exit_code: int | None) -> int:
    """The exit code of the command for a job that ended as Ray's `status` says: the driver's own,
    128 + the number of the signal that ended it, 130 for a job that was stopped."""
    if status == "SUCCEEDED":
        return EXIT_OK
    if status == "STOPPED":
        return EXIT_INTERRUPTED
    if not driver_exit_code:
        return EXIT_FAILED
    return driver_exit_code if driver_exit_code > 0 else 128 - driver_exit_code


def ending(details: "JobDetails", job_id: str) -> str | None:
    """What to say about how the job ended; None where its own log has said it all."""
    status = details.status.value
    if status == "SUCCEEDED":
        return None
    if status == "STOPPED":
        return f"job {job_id} was stopped"
    code = details.driver_exit_code
    if code is None:
        reason = " ".join((details.message or "no reason given").split())
        return f"job {job_id} failed before its driver ended: {reason}"
    if code == COMMAND_NOT_FOUND:
        return (
            f"job {job_id} failed: the head node has no `python` on the PATH that Ray was started "
            "with. Start Ray from the activated environment that holds Slipstream."
        )
    return f"job {job_id} failed with exit code {code}"
