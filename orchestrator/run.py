"""`slipstream run`: from a validated config to a summary, with every failure as one paragraph.

Prepares what needs no cluster (tasks first, so that bad data leaves no run behind), connects Ray,
hands over to the pipeline, and turns how that ends into files and an exit code.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
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
from orchestrator.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, Problem, RunError
from orchestrator.flow import Flow
from orchestrator.history.ledger_file import LedgerFile, last_step
from orchestrator.history.resuming import differences, refusals
from orchestrator.loops import first_cause
from orchestrator.metrics import Metrics
from orchestrator.pipeline import Outcome, Pipeline
from orchestrator.records import JsonLines
from orchestrator.reporting import Reporter
from orchestrator.run_directory import RunDirectory
from orchestrator.steering import RunState
from orchestrator.supervised_learner import explained
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
    directory = _directory(config, runs_folder, resume, console)
    _log_to(directory)
    console.note(f"run directory: {directory.path}")
    meta = TrajectoryMeta(tokenizer=fingerprint(tokenizer), model=config.model.path)
    metrics = Metrics(
        run=directory.path.name,
        model=config.model.path,
        objective=config.learner.objective.preset,
        verifiers=(task.verifier for task in (*tasks.train, *tasks.held_out)),
    )
    with (
        JsonLines(directory.metrics_jsonl) as lines,
        closing(_ledger_file(directory, tasks, resume is not None)) as ledger_file,
    ):
        directory.write_config(config.model_dump(mode="json"))
        reporter = Reporter(config, console, metrics, lines)
        try:
            if config.metrics.enabled:
                host = cluster.host_to_bind(config.metrics.host)
                address = metrics.serve(host, config.metrics.port)
                directory.write_targets([address])
                console.note(f"metrics: http://{address}/metrics")
            config = cluster.connect(config)
            outcome, flow = asyncio.run(
                _play(config, directory, tasks, meta, reporter, ledger_file, resume is not None)
            )
            summary = _summary(config, outcome, reporter, flow)
            directory.write_summary(summary)
            console.summary(summary, title=directory.path.name)
        except RunError as error:
            logger.error("the run failed: %s", error)
            if error.culprit:
                console.log_tail(directory.logs / f"{error.culprit}.log")
            _tell_how_to_go_on(console, directory)
            raise
        finally:
            ray.shutdown()
            metrics.close()
            directory.write_targets([])
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_OK


def _tell_how_to_go_on(console: Console, directory: RunDirectory) -> None:
    with suppress(RunError):  # the ledger itself may be what failed
        if done := last_step(directory.ledger):
            console.note(
                f"{done} steps are kept: `slipstream run CONFIG --resume "
                f"{directory.path.name}` goes on after them"
            )


async def _play(
    config: RunConfig,
    directory: RunDirectory,
    tasks: Tasks,
    meta: TrajectoryMeta,
    reporter: Reporter,
    ledger_file: LedgerFile,
    resumed: bool,
) -> tuple[Outcome, Flow]:
    try:
        pipeline = Pipeline(
            config,
            directory,
            tasks=tasks,
            meta=meta,
            reporter=reporter,
            ledger_file=ledger_file,
            resumed=resumed,
        )
        loop = asyncio.get_running_loop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, pipeline.interrupt)
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
    config: RunConfig, runs_folder: Path, resume: Path | None, console: Console
) -> RunDirectory:
    """The directory to run in, which is this process's own from now on.

    Raises ConfigError when the run to be resumed was another one.
    """
    if resume is None:
        directory = RunDirectory.create(runs_folder, config.name)
        directory.lock()
        return directory
    directory = RunDirectory.find(runs_folder, str(resume))
    directory.lock()
    changes = differences(directory.read_config(), config.model_dump(mode="json"))
    problems = refusals(changes)
    if "learner.ranks" in changes:
        problems += _ranks_refused(directory, config)
    if problems:
        raise ConfigError(f"{directory.path.name} cannot be resumed with this config", problems)
    for key, (old, new) in changes.items():
        console.note(f"changed since the run was started: {key} {old} -> {new}")
    directory.point_latest()
    return directory


def _ranks_refused(directory: RunDirectory, config: RunConfig) -> list[Problem]:
    """Steps can only be done again by as many ranks, which also keep the versions for it."""
    newest = max(directory.checkpoint_steps(), default=0)
    again = last_step(directory.ledger) > newest
    if not again and not config.deterministic:
        return []
    return [
        Problem(
            "learner.ranks",
            f"{config.learner.ranks} ranks cannot do steps again that others did"
            if again
            else "a deterministic run keeps its number of ranks",
            "the number that the run had",
            "Stop a run with `slipstream stop`, which saves, before you change it.",
        )
    ]


def _ledger_file(directory: RunDirectory, tasks: Tasks, resumed: bool) -> LedgerFile:
    if not resumed:
        return LedgerFile.create(directory.ledger, tasks=tasks.fingerprint)
    ledger_file = LedgerFile(directory.ledger)
    if ledger_file.about().get("tasks") != tasks.fingerprint:
        ledger_file.close()
        raise RunError(
            "the training tasks are not those that the run was started with: their order would be "
            "another one, so some would be drawn twice and others never. Resume with the same data."
        )
    return ledger_file


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
