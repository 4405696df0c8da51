"""`slipstream run`: from a validated config to a summary, with every failure as one paragraph.

Prepares what needs no cluster (tasks first, so that bad data leaves no run behind), connects Ray,
hands over to the pipeline, and turns how that ends into files and an exit code.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.trajectory import TrajectoryMeta
from learner.group import LearnerDied
from orchestrator import cluster
from orchestrator.config import RunConfig
from orchestrator.console import Console
from orchestrator.control.server import ControlServer
from orchestrator.errors import EXIT_INTERRUPTED, EXIT_OK, RunError
from orchestrator.flow import Flow
from orchestrator.loops import first_cause
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Outcome, Pipeline, explained
from orchestrator.records import JsonLines
from orchestrator.reporting import Reporter
from orchestrator.run_directory import RunDirectory
from orchestrator.steering import RunState
from orchestrator.task_loading import Tasks, fingerprint, load_tasks, load_tokenizer

UPLOADED = "working_dir_files"
"""The folder in which Ray unpacks the working directories of jobs."""

logger = logging.getLogger(__name__)


def run(config: RunConfig, *, runs_folder: Path, resume: Path | None = None) -> int:
    """Run to the end, to an interrupt or to a failure; the exit code.

    Raises SlipstreamError whose message is the paragraph of cause.
    """
    config = config.resolved()
    console = Console()
    tokenizer = load_tokenizer(config.model)
    tasks = load_tasks(config, tokenizer)
    console.note(f"{len(tasks.train)} training tasks, {len(tasks.held_out)} held-out tasks")
    if tasks.overlap:
        console.note(
            f"warning: {tasks.overlap} held-out prompts are training prompts too, so held-out "
            "accuracy is partly accuracy on trained tasks"
        )
    if UPLOADED in runs_folder.resolve().parts:
        console.note(
            f"warning: {runs_folder.resolve()} is a job's copy of its working directory, which Ray "
            "deletes: pass --runs-folder, or use `slipstream submit`"
        )
    directory, checkpoint = _directory(config, runs_folder, resume)
    _log_to(directory)
    resolved = config.model_dump(mode="json")
    if checkpoint is not None:
        for change in differences(directory.read_config(), resolved):
            console.note(f"warning: differs from the resumed run: {change}")
    directory.write_config(resolved)
    console.note(f"run directory: {directory.path}")
    meta = TrajectoryMeta(tokenizer=fingerprint(tokenizer), model=config.model.path)
    metrics = Metrics(
        run=directory.path.name,
        model=config.model.path,
        objective=config.learner.objective.preset,
        verifiers=(task.verifier for task in (*tasks.train, *tasks.held_out)),
    )
    with JsonLines(directory.metrics_jsonl) as lines:
        reporter = Reporter(config, console, metrics, lines)
        try:
            if config.metrics.enabled:
                host = cluster.host_to_bind(config.metrics.host)
                address = metrics.serve(host, config.metrics.port)
                directory.write_targets([address])
                console.note(f"metrics: http://{address}/metrics")
            config = cluster.connect(config)
            outcome, flow = asyncio.run(_play(config, directory, tasks, meta, reporter, checkpoint))
            summary = _summary(config, outcome, reporter, flow)
            directory.write_summary(summary)
            console.summary(summary, title=directory.path.name)
        except RunError as error:
            logger.error("the run failed: %s", error)
            if error.culprit:
                console.log_tail(directory.logs / f"{error.culprit}.log")
            raise
        finally:
            ray.shutdown()
            metrics.close()
            directory.write_targets([])
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_OK


async def _play(
    config: RunConfig,
    directory: RunDirectory,
    tasks: Tasks,
    meta: TrajectoryMeta,
    reporter: Reporter,
    checkpoint: Path | None,
) -> tuple[Outcome, Flow]:
    try:
        pipeline = Pipeline(
            config,
            directory,
            tasks=tasks,
            meta=meta,
            reporter=reporter,
            resume_from=checkpoint,
        )
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            reporter.note("interrupted: finishing the step and saving (again to end at once)")
            pipeline.interrupt()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        async with _steered(config, directory, pipeline, reporter):
            return await pipeline.run(), pipeline.flow
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        error = first_cause(group)
        if isinstance(error, RunError):
            raise error from None
        if isinstance(error, LearnerDied | ValueError):
            raise explained(error) from error
        raise
    except (LearnerDied, ValueError) as error:
        raise explained(error) from error


@asynccontextmanager
async def _steered(
    config: RunConfig, directory: RunDirectory, pipeline: Pipeline, reporter: Reporter
) -> AsyncIterator[None]:
    """Serve the control service, if there is to be one."""
    if not config.control.enabled:
        yield
        return
    server = ControlServer(
        config.control,
        pipeline.live,
        directory.path.name,
        directory.path,
        announce=cluster.is_shared(),
    )
    reporter.note(f"control: {await server.start()}")
    try:
        yield
        pipeline.live.state = RunState.ENDED
    except Exception:
        pipeline.live.state = RunState.FAILED
        raise
    finally:
        await server.stop()


def _directory(
    config: RunConfig, runs_folder: Path, resume: Path | None
) -> tuple[RunDirectory, Path | None]:
    if resume is None:
        return RunDirectory.create(runs_folder, config.name), None
    directory = RunDirectory.find(runs_folder, str(resume))
    checkpoint = directory.newest_checkpoint()
    if checkpoint is None:
        raise RunError(
            f"{directory.path} has no finished checkpoint to resume from. Start a new run, and "
            "set checkpoint.every to save more often."
        )
    directory.point_latest()
    return directory, checkpoint


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys whose values differ between two resolved configurations, as `key old -> new`."""
    found: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} {old} -> {new}")
    return found


def _log_to(directory: RunDirectory) -> None:
    """The driver's own log goes to the run directory; the terminal stays readable."""
    handler = logging.FileHandler(directory.logs / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _summary(config: RunConfig, outcome: Outcome, reporter: Reporter, flow: Flow) -> dict[str, Any]:
    seconds = time.time() - psutil.Process().create_time()
    figures = reporter.summary(flow, seconds=seconds, training_seconds=outcome.training_seconds)
    return {
        "name": config.name,
        "seed": config.seed,
        "objective": config.learner.objective.preset,
        "interrupted": outcome.interrupted,
        "stopped": outcome.stopped,
        "accuracy_before": outcome.before.accuracy if outcome.before else None,
        "accuracy_after": outcome.after.accuracy if outcome.after else None,
        "parity_max_abs": outcome.parity_max_abs,
        **figures,
    }
