"""`slipstream submit`: preflight, submission, and following the job to its end."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from orchestrator.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, SlipstreamError, UsageError

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.submission.package import Package

OPTIONS = ("--help", "--address", "--no-wait", "--working-dir", "--runs-folder", "--resume")
"""Options of the command that are not keys of the configuration."""
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


class PreflightError(SlipstreamError):
    """Nothing was submitted; lists every problem found."""

    exit_code = EXIT_USAGE

    def __init__(self, url: str, problems: Sequence[str]) -> None:
        count = len(problems)
        heading = f"not submitted to {url}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([heading, *(f"  {problem}" for problem in problems)]))


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "submit",
        help="run on a Ray cluster, as a job",
        description="Check that a run can work on a Ray cluster, submit it as a job, follow its "
        "log and end with its exit code. Ctrl-C ends the following and leaves the job alone.",
        epilog="Exit codes: the run's own; 2 when nothing was submitted because of a problem "
        "found before; 130 after Ctrl-C and for a job that was stopped. Any key of the "
        "configuration may be set on the command line, as for `slipstream run`.",
        allow_abbrev=False,
        usage="slipstream submit CONFIG [options] [--section.key value]...",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's TOML file")
    parser.add_argument(
        "--address",
        metavar="URL",
        help="Ray's dashboard, such as http://head-node:8265 (default: RAY_API_SERVER_ADDRESS, "
        "else RAY_ADDRESS)",
    )
    parser.add_argument(
        "--working-dir",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="folder that the cluster gets a copy of (default: the current one)",
    )
    parser.add_argument(
        "--runs-folder",
        default="~/slipstream-runs",
        metavar="DIR",
        help="where run directories are made on the cluster: absolute, and on storage that all "
        "nodes mount if there are several (default: ~/slipstream-runs)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on from the last checkpoint of RUN in the runs folder (default: the newest run); "
        "write it after CONFIG",
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="print the job's id and return at once",
    )
    parser.set_defaults(command=submit)


def submit(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from orchestrator.config_file import load, read
    from orchestrator.submission import job
    from orchestrator.submission.dashboard import dashboard_url
    from orchestrator.submission.package import list_package, mebibytes

    url = dashboard_url(_address(arguments.address))
    _require_lasting(arguments.runs_folder)
    config = load(arguments.config, arguments.overrides)
    raw = read(arguments.config, arguments.overrides)
    if not arguments.working_dir.is_dir():
        raise UsageError(f"--working-dir {arguments.working_dir}: there is no such folder.")
    package = list_package(arguments.working_dir)
    preflight(url, raw, config, arguments.config, package)
    for note in notes(raw, package):
        _say(note)

    command = job.entrypoint(
        str(package.inside(arguments.config)),
        raw,
        arguments.overrides,
        runs_folder=arguments.runs_folder,
        resume=arguments.resume,
    )
    _say(f"uploading {len(package.files)} files, {mebibytes(package.size_bytes)}")
    client = job.connect(url)
    try:
        job_id = client.submit_job(
            entrypoint=command, runtime_env=job.runtime_environment(package, os.environ)
        )
    except (RuntimeError, OSError) as error:
        raise PreflightError(
            url, [f"Ray refused the job: {' '.join(str(error).split())}"]
        ) from None
    _say(f"job {job_id} of {url}; run directories in {arguments.runs_folder} of the head node")
    if arguments.no_wait:
        print(job_id)
        return EXIT_OK
    return _to_its_end(client, job_id, url)


def _to_its_end(client: Any, job_id: str, url: str) -> int:
    from orchestrator.submission import job

    try:
        details = job.follow(client, job_id, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        _say(
            f"no longer following; job {job_id} goes on. Follow it: ray job logs --address {url} "
            f"--follow {job_id}. End it after its step, with a checkpoint: ray job stop --address "
            f"{url} --no-wait {job_id}"
        )
        return EXIT_INTERRUPTED
    if text := job.ending(details, job_id):
        _say(text)
    return job.exit_code(details.status.value, details.driver_exit_code)


def preflight(
    url: str,
    raw: dict[str, Any],
    config: "RunConfig",
    config_path: Path,
    package: "Package",
) -> None:
    """Raise PreflightError with all that stands against the submission."""
    from orchestrator.submission.inputs import input_problems
    from orchestrator.submission.package import size_problem, upload_limit_bytes

    problems = [str(problem) for problem in input_problems(raw, config, config_path, package)]
    if too_big := size_problem(package, upload_limit_bytes()):
        problems.append(too_big)
    problems += _cluster_problems(url, config)
    if problems:
        raise PreflightError(url, problems)


def _cluster_problems(url: str, config: "RunConfig") -> list[str]:
    import ray

    from orchestrator.capacity import capacity_problems
    from orchestrator.submission.dashboard import (
        ClusterUnavailable,
        Dashboard,
        authentication_headers,
        version_problem,
    )

    try:
        dashboard = Dashboard(url, authentication_headers())
        mismatch = version_problem(ray.__version__, dashboard.ray_version())
        if mismatch:
            return [mismatch]
        return capacity_problems(config, dashboard.nodes())
    except ClusterUnavailable as error:
        return [str(error)]


def notes(raw: dict[str, Any], package: "Package") -> list[str]:
    """What nothing can be known about from here, and is worth a look."""
    from orchestrator.submission.inputs import cluster_paths

    found = [
        f"{path.key} {path.text} is taken for a path that every node of the cluster has"
        for path in cluster_paths(raw)
    ]
    if not package.holds("orchestrator/cli.py"):
        found.append("Slipstream itself is the one installed on the nodes")
    return found


def _address(option: str | None) -> str:
    for address in (option, *(os.environ.get(name) for name in ADDRESS_VARIABLES)):
        if address:
            return address
    raise UsageError(
        "no cluster to submit to: give the URL of its Ray dashboard with --address, such as "
        "http://head-node:8265, or in RAY_API_SERVER_ADDRESS. `slipstream run` needs no cluster."
    )


def _require_lasting(runs_folder: str) -> None:
    of_home = runs_folder == "~" or runs_folder.startswith("~/")
    if not PurePosixPath(runs_folder).is_absolute() and not of_home:
        raise UsageError(
            f"--runs-folder {runs_folder} would lie in the job's copy of the working directory, "
            "which Ray deletes. Give an absolute path of the cluster, or one that starts with ~/."
        )


def _say(text: str) -> None:
    """To the standard error, for the standard output is the job's log."""
    print(f"slipstream: {text}", file=sys.stderr, flush=True)
