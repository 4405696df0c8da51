"""Faults for a chaos run: a process is killed or stopped, a file torn, a fleet moved.

A fault does its harm and returns; whether the run gets over it is the test's to watch.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
from live import QUICKSTART, LiveRun

from orchestrator.control.client import Client
from orchestrator.control.discovery import by_directory
from orchestrator.errors import SlipstreamError
from orchestrator.steering import Role, RunState, RunStatus

LIMIT_S = 400.0


class Scene:
    """A run that goes on in another process whenever its driver has ended."""

    def __init__(self, run: LiveRun, options: list[str]) -> None:
        self.run = run
        self._options = options
        self.resumes = 0
        self.story: list[str] = []

    def status(self) -> RunStatus | None:
        """A snapshot; None while nobody answers."""
        try:
            with Client(
                by_directory(self.run.directory), deadline_s=5, retry_delays_s=()
            ) as client:
                return client.status()
        except (SlipstreamError, OSError):
            return None

    def until(self, holds: Callable[[RunStatus], bool], what: str) -> RunStatus:
        """The first snapshot of which `holds` is true."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if (code := self.run.process.poll()) is not None:
                raise AssertionError(f"ended with {code} before {what}:\n{self.told}")
            if (status := self.status()) is not None and holds(status):
                return status
            time.sleep(0.2)
        raise AssertionError(f"never {what}:\n{self.told}\n{self.status()}")

    def more_steps(self, count: int) -> RunStatus:
        """Wait until `count` more steps are done."""
        start = self.until(lambda s: s.state is RunState.TRAINING, "training").step
        return self.until(lambda s: s.step >= start + count, f"at step {start + count}")

    def resume(self) -> None:
        """Go on in a new process."""
        self.run.wait()
        self.resumes += 1
        self.run = LiveRun(QUICKSTART, self.run.runs.parent, [*self._options, "--resume"])
        self.until(lambda s: s.state is RunState.TRAINING, "training after --resume")

    @property
    def told(self) -> str:
        """The faults so far and what the run has printed."""
        return f"faults: {', '.join(self.story)}\n{self.run.output}"

    def pids(self, role: Role) -> list[int]:
        """Processes of a role's workers that are ready."""
        status = self.until(
            lambda s: any(f.role is role and f.count("ready") for f in s.fleets), f"a {role} ready"
        )
        fleet = next(fleet for fleet in status.fleets if fleet.role is role)
        return [worker.pid for worker in fleet.workers if worker.pid and worker.state == "ready"]

    def child(self, mark: str) -> int:
        """A process of the run whose title or command has `mark`."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for process in psutil.Process(self.run.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if mark in " ".join([process.name(), *process.cmdline()]):
                        return process.pid
            time.sleep(0.2)
        raise AssertionError(f"no process {mark}:\n{self.told}")


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_rollout_worker(scene: Scene, chance: random.Random) -> None:
    """The actor dies, and with it whatever its engine was doing."""
    _kill(chance.choice(scene.pids(Role.ROLLOUT)))


def kill_engine(scene: Scene, chance: random.Random) -> None:
    """The engine's own process dies inside a living actor."""
    _kill(scene.child("EngineCore"))


def stop_engine(scene: Scene, chance: random.Random) -> None:
    """The engine hangs: it neither answers nor dies."""
    _kill(scene.child("EngineCore"), signal.SIGSTOP)


def slow_engine(scene: Scene, chance: random.Random) -> None:
    """For a while the engine gets a tenth of its time."""
    engine = scene.child("EngineCore")
    for _ in range(30):
        _kill(engine, signal.SIGSTOP)
        time.sleep(0.45)
        _kill(engine, signal.SIGCONT)
        time.sleep(0.05)


def kill_verifier_worker(scene: Scene, chance: random.Random) -> None:
    """The actor dies, with groups being scored."""
    _kill(chance.choice(scene.pids(Role.VERIFIER)))


def stop_verifier_worker(scene: Scene, chance: random.Random) -> None:
    """The actor hangs."""
    _kill(chance.choice(scene.pids(Role.VERIFIER)), signal.SIGSTOP)


def kill_learner_rank(scene: Scene, chance: random.Random) -> None:
    """A rank dies, in whatever it was doing."""
    _kill(chance.choice(scene.pids(Role.LEARNER)))


def stop_learner_rank(scene: Scene, chance: random.Random) -> None:
    """A rank hangs, until its step takes too long."""
    _kill(chance.choice(scene.pids(Role.LEARNER)), signal.SIGSTOP)


def kill_store(scene: Scene, chance: random.Random) -> None:
    """The owner of all ready groups dies: the run ends and is resumed."""
    _kill(scene.child("_StoreActor"))
    scene.resume()


def kill_driver(scene: Scene, chance: random.Random) -> None:
    """Everything ends at once, in the middle of things, and is resumed."""
    _kill(scene.run.process.pid)
    scene.resume()


def kill_driver_and_torn_files(scene: Scene, chance: random.Random) -> None:
    """As a killed driver, and the newest segment of the log ends in the middle of a group."""
    _kill(scene.run.process.pid)
    scene.run.wait()
    segments = sorted((scene.run.directory / "trajectories").glob("*.arrows"))
    with segments[-1].open("r+b") as file:
        file.truncate(max(0, segments[-1].stat().st_size - chance.randrange(1, 400)))
    scene.resume()


def move_fleets(scene: Scene, chance: random.Random) -> None:
    """The verifier fleet grows and shrinks again."""
    with Client(by_directory(scene.run.directory)) as client:
        client.scale(Role.VERIFIER, 2)
    scene.more_steps(1)
    with Client(by_directory(scene.run.directory)) as client:
        client.scale(Role.VERIFIER, 1)


def kill_learner_in_a_save(scene: Scene, chance: random.Random) -> None:
    """A checkpoint is asked for, and the learner dies while it is written or just about."""

    def save() -> None:
        with suppress(SlipstreamError), Client(by_directory(scene.run.directory)) as client:
            client.checkpoint()

    rank = scene.pids(Role.LEARNER)[0]
    saving = threading.Thread(target=save)
    saving.start()
    folder = scene.run.directory / "checkpoints"
    end = time.monotonic() + LIMIT_S
    while not list(folder.glob(".step_*.partial")) and saving.is_alive():
        assert time.monotonic() < end, scene.told
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.05))
    _kill(rank)
    saving.join()


FAULTS: tuple[Callable[[Scene, random.Random], None], ...] = (
    kill_rollout_worker,
    kill_engine,
    stop_engine,
    slow_engine,
    kill_verifier_worker,
    stop_verifier_worker,
    kill_learner_rank,
    stop_learner_rank,
    kill_store,
    kill_driver,
    kill_driver_and_torn_files,
    move_fleets,
    kill_learner_in_a_save,
)
