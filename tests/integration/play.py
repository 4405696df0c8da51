"""A long live run for tests that steer it, watch it and disturb it."""

import subprocess
import time
from collections.abc import Callable

from live import LiveRun

from orchestrator.control.client import Client
from orchestrator.control.discovery import by_directory
from orchestrator.steering import FleetStatus, Role, RunStatus

LIMIT_S = 300.0


class Play:
    """A run and a client of its control service."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run

    def begin(self) -> None:
        """Wait until the run trains."""
        self.run.wait_for(r"step +2/")
        self.client = Client(by_directory(self.run.directory))

    def close(self) -> None:
        """End the run, unless it has ended."""
        if self.run.process.poll() is None:
            self.run.interrupt()
            self.run.wait()

    def until(self, holds: Callable[[RunStatus], bool], what: str) -> RunStatus:
        """The first snapshot of which `holds` is true."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            status = self.client.status()
            if holds(status):
                return status
            time.sleep(0.2)
        raise AssertionError(f"never {what}; last: {status}\n{self.run.output}")

    def more_steps(self, count: int) -> RunStatus:
        """Wait until `count` more steps are done."""
        goal = self.client.status().step + count
        return self.until(lambda status: status.step >= goal, f"at step {goal}")

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A `slipstream` command about this run."""
        return self.run.command(*words)


def fleet(status: RunStatus, role: Role) -> FleetStatus:
    """The fleet of one role."""
    return next(fleet for fleet in status.fleets if fleet.role is role)


def even(status: RunStatus, role: Role, workers: int) -> bool:
    """Whether the fleet has exactly this many workers and all of them are ready."""
    there = fleet(status, role)
    return there.target == len(there.workers) == there.count("ready") == workers
