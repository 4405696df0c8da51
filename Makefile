# Every target sets up what it needs on a fresh machine: CPython 3.11 with venv, and make.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
MONITOR_PORT ?= 9090
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-all chaos lint proto bench docs monitor lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.complete  ## the environment in .venv, from the lock file

# The CPU wheel of torch is not on PyPI; where pip knows no local copy it comes from PyTorch's index.
$(VENV)/.complete: requirements-cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --compile-bytecode \
	  -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCH) 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	       --index-url $(TORCH_INDEX) $(TORCH)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

demo: setup  ## train the quick-start model: about four minutes on two cores
	$(BIN)/slipstream run deploy/quickstart/quickstart.toml

test: setup  ## what CI runs
	$(BIN)/lint-imports
	$(PYTEST) -m "not heavy" tests

test-unit: setup  ## without Ray, vLLM or torch.distributed
	$(PYTEST) tests/unit

test-all: setup  ## also the tests that take minutes each
	$(BIN)/lint-imports
	$(PYTEST) tests

SEEDS ?= 10
chaos: setup  ## SEEDS live runs with random faults, two to three minutes each
	CHAOS_SEEDS=$(SEEDS) $(PYTEST) tests/chaos

lint: setup  ## formatting, lint, import contracts, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

proto: setup  ## generate the control service's code from its .proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
	  orchestrator/control/control.proto

bench: setup  ## measurements, as a table and under runs/bench/
	$(BIN)/python -m tests.benchmarks

docs: setup  ## write what is generated: configuration reference, dashboards
	$(BIN)/python -m orchestrator.config_reference > docs/configuration.md
	$(BIN)/python deploy/grafana/make_dashboards.py

monitor:  ## Prometheus beside the runs of ./runs, on http://127.0.0.1:9090
	@command -v prometheus >/dev/null || { echo "Prometheus is not installed: apt-get install prometheus," \
	  "or put the binary of prometheus.io on the PATH" >&2; exit 1; }
	mkdir -p runs/targets runs/.prometheus
	prometheus --config.file=deploy/prometheus/local.yml --storage.tsdb.path=runs/.prometheus \
	  --web.listen-address=127.0.0.1:$(MONITOR_PORT)

lock: setup  ## write what is installed into the lock file, after a deliberate upgrade
	{ grep '^#' requirements-cpu.lock; $(BIN)/uv pip freeze --python $(BIN)/python \
	  | grep -viE '^(-e|torch|torchvision|torchaudio|torchcodec|triton|uv)\b'; } > requirements-cpu.lock.new
	mv requirements-cpu.lock.new requirements-cpu.lock

clean:  ## remove the environment and the runs
	rm -rf $(VENV) runs
