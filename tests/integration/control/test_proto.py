"""The generated code is what protoc makes of control.proto, and every part of it is explained."""

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import orchestrator.control

FOLDER = Path(orchestrator.control.__file__).parent
ROOT = FOLDER.parents[1]
GENERATED = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py")


def test_generated_files_are_current(tmp_path: Path) -> None:
    assert importlib.util.find_spec("grpc_tools"), "grpcio-tools is among the dev dependencies"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs]
    subprocess.run([*command, "orchestrator/control/control.proto"], cwd=ROOT, check=True)
    for name in GENERATED:
        fresh = tmp_path / "orchestrator" / "control" / name
        assert fresh.read_text() == (FOLDER / name).read_text(), f"{name}: run `make proto`"


def test_every_call_is_documented() -> None:
    lines = (FOLDER / "control.proto").read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r"\s*(rpc|service) ", line):
            assert before.strip().startswith("//"), line
