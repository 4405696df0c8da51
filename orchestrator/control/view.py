"""One screen about a run: what holds it up first, then where everything is.

`rows` decides what is said; the terminal and the plain form only lay it out.
"""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.bottleneck import percent
from orchestrator.records import StepRecord
from orchestrator.steering import FleetStatus, QueueStatus, RunState, RunStatus

STATES = ("ready", "starting", "draining")
"""Worker states that a fleet's line always names."""
FATES = ("generated", "trained", "masked", "dropped", "superseded", "pending")
"""Order of the ledger's counts; others follow."""
MIB = 1 << 20
_LABEL_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled line; `alarm` marks what somebody should look at."""

    label: str
    text: str
    alarm: bool = False


def headline(status: RunStatus) -> str:
    """Run, state and how far it is, in one line."""
    state = status.state.value
    if status.paused:
        state += f" ({', '.join(sorted(status.paused))} paused)"
    parts = [status.run, state, f"step {status.step}/{status.steps}", f"version {status.version}"]
    if status.lineage:
        parts.append(f"resumed {status.lineage}x")
    parts.append(f"up {duration(status.time - status.started_at)}")
    return "  ".join(parts)


def bottleneck(status: RunStatus) -> str:
    """What to give more resources to, with the evidence."""
    if status.paused:
        names = " and ".join(sorted(status.paused))
        return f"none: {names} paused; `slipstream resume` goes on"
    if status.state in (RunState.STOPPING, RunState.ENDED, RunState.FAILED):
        return f"none: the run is {status.state}"
    if status.last_step is None:
        return "not known yet: no step is done"
    found = status.last_step.bottleneck
    return f"{found.stage.words}: {found.evidence}"


def rows(status: RunStatus) -> list[Row]:
    """Everything below the bottleneck."""
    found = [Row("warning", warning, alarm=True) for warning in status.warnings]
    if status.last_step is not None:
        found += _step_rows(status.last_step)
    found.append(Row("queue", _queue(status.queue)))
    found += [_fleet(fleet) for fleet in status.fleets]
    limits = status.limits
    found.append(
        Row("limits", f"max_staleness {limits.max_staleness}, max_groups {limits.max_groups}")
    )
    found.append(_ledger(status))
    found.append(Row("results", _results(status)))
    return found


def plain(status: RunStatus) -> str:
    """The screen as text without any styling."""
    lines = [headline(status), f"{'bottleneck':<{_LABEL_WIDTH}}{bottleneck(status)}"]
    lines += [f"{row.label:<{_LABEL_WIDTH}}{row.text}" for row in rows(status)]
    return "\n".join(lines)


def screen(status: RunStatus) -> RenderableType:
    """The screen for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for row in rows(status):
        grid.add_row(row.label, Text(row.text, style="bold yellow" if row.alarm else ""))
    return Group(
        Text(headline(status), style="bold"),
        Panel(Text(bottleneck(status), style="bold"), title="bottleneck", title_align="left"),
        grid,
    )


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _step_rows(record: StepRecord) -> list[Row]:
    total = record.seconds
    phases = sorted(record.phase_seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{phase.value} {seconds:.1f} s ({percent(seconds / total)})"
        for phase, seconds in phases
        if seconds > 0
    )
    learnt = [
        f"reward {_number(record.reward)}",
        f"accuracy {_number(record.accuracy)}",
        f"lag {_number(record.staleness_mean)}",
        f"{record.trained_tokens_per_second:.0f} trained tokens/s",
    ]
    found = [
        Row(f"step {record.step}", f"{total:.1f} s{f': {shares}' if shares else ''}"),
        Row("", ", ".join(learnt)),
    ]
    if record.skipped:
        found.append(Row("", f"skipped: {record.skipped}", alarm=True))
    if record.unscored:
        text = f"{record.unscored} of {record.samples} samples without a verdict"
        found.append(Row("", text, alarm=True))
    return found


def _queue(queue: QueueStatus) -> str:
    waiting = f" ({queue.waiting_groups} to be tried again)" if queue.waiting_groups else ""
    age = f", oldest waits {duration(queue.oldest_age_s)}" if queue.ready_groups else ""
    return (
        f"{queue.ready_groups} groups ready{age}; "
        f"{queue.generating_groups} of {queue.generation_slots} slots generating, "
        f"{queue.verifying_groups} being scored, {queue.under_way_groups} under way{waiting}; "
        f"{queue.bytes / MIB:.1f} of {queue.capacity_bytes / MIB:.0f} MiB"
    )


def _fleet(fleet: FleetStatus) -> Row:
    others = sorted({worker.state for worker in fleet.workers} - set(STATES))
    counts = [f"{fleet.count(state)} {state}" for state in (*STATES, *others)]
    versions = sorted({w.version for w in fleet.workers if w.version is not None})
    serving = f", serving version {' and '.join(map(str, versions))}" if versions else ""
    restarts = f", {fleet.restarts} restarts" if fleet.restarts else ""
    text = f"target {fleet.target}: {', '.join(counts)}{serving}{restarts}"
    return Row(fleet.role.value, text, alarm=fleet.count("ready") < fleet.target)


def _ledger(status: RunStatus) -> Row:
    others = sorted(status.samples.keys() - set(FATES))
    fates = [fate for fate in (*FATES, *others) if fate in status.samples]
    counts = ", ".join(f"{status.samples[fate]} {fate}" for fate in fates)
    verdict = "balanced" if status.balanced else "DOES NOT ADD UP; please report it"
    text = f"{verdict}{f': {counts}' if counts else ''}"
    return Row("ledger", text, alarm=not status.balanced)


def _results(status: RunStatus) -> str:
    accuracy = status.held_out_accuracy
    evaluated = "not evaluated yet" if accuracy is None else f"held-out accuracy {accuracy:.1%}"
    step = status.checkpoint_step
    saved = "no checkpoint yet" if step is None else f"checkpoint of step {step}"
    return f"{evaluated}, {saved}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
