"""A child that follows its owner dies with it, and only then."""

import os
import signal
import subprocess
import sys
import time

CHILD = """
import time
from actors.lifeline import follow_owner
follow_owner()
print("up", flush=True)
time.sleep(600)
"""

OWNER = f"""
import os, subprocess, sys, time
os.environ["SLIPSTREAM_ENGINE_OWNER"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_child_of_a_killed_owner_dies() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    os.kill(child, 0)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end = time.monotonic() + 60
    while _alive(child):
        assert time.monotonic() < end, "the child outlived its owner"
        time.sleep(0.02)


def test_without_an_owner_nothing_happens() -> None:
    code = "from actors.lifeline import follow_owner; follow_owner(); print('fine')"
    environment = {k: v for k, v in os.environ.items() if k != "SLIPSTREAM_ENGINE_OWNER"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "fine"


def _alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for yet does not count."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
