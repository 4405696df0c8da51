"""The rollout worker on a real engine: batches, weight syncs, parity probe, death."""

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
from rollout_doubles import (
    AGREEMENT,
    CONFIG,
    META,
    PROMPT,
    TEMPERATURE,
    RawWorker,
    WatchedWorker,
    model_of,
    publish,
)
from tiny_models import (
    response_logprobs,
    save_model,
    tensors_of,
)
from transformers import LlamaForCausalLM

from actors.engine import EngineError
from actors.messages import GroupReceipt, GroupRequest, SyncReport, WorkerInfo
from actors.parity import (
    RAW,
    SHIFTED_AHEAD,
    SHIFTED_BEHIND,
    TENSORS,
    ParityReport,
    check_samples,
)
from actors.trajectory import WeightLabel, read_meta, tokens, validate
from actors.weights import WeightStagingError, remove_staged
from actors.worker import MAX_CONCURRENCY, RolloutWorker

pytestmark = pytest.mark.integration


def request(group_id: int, n: int = 4, attempt: int = 0) -> GroupRequest:
    return GroupRequest(group_id, f"task-{group_id}", PROMPT, n, attempt)


def assert_agrees(batch: pa.RecordBatch, model: LlamaForCausalLM) -> None:
    """Every sample of `batch` costs what transformers says about `model`."""
    for row in batch.select(["response_ids", "behavior_logprobs"]).to_pylist():
        expected = response_logprobs(model, list(PROMPT), row["response_ids"], TEMPERATURE)
        np.testing.assert_allclose(row["behavior_logprobs"], expected, rtol=0, atol=AGREEMENT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=128 << 20,
        )
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(model_of(0), tmp_path_factory.mktemp("model")))


def spawn(cls: type[RolloutWorker], model: str, log: Path | None, run_id: str) -> Any:
    actor = ray.remote(max_concurrency=MAX_CONCURRENCY, num_cpus=1)(cls)
    return actor.remote("rollout-0", CONFIG, model, model, META, run_id, log and str(log))


@dataclass
class Fleet:
    """One worker actor, on version 1 when the first test gets it; each test syncs further."""

    actor: Any
    info: WorkerInfo
    log: Path
    version: int = 1

    def call(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*args), timeout=120)

    def sync(self, **options: Any) -> SyncReport:
        self.version += 1
        return self.call("sync", publish(self.version, **options))

    def generate(self, *requests: GroupRequest) -> list[Any]:
        return [ray.get(ref, timeout=120) for ref in self.actor.generate.remote(requests)]

    def until_tokens(self, count: int) -> None:
        goal = self.call("progress").tokens_generated + count
        while self.call("progress").tokens_generated < goal:
            time.sleep(0.01)


@pytest.fixture(scope="module")
def fleet(
    cluster: None, model_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    log = tmp_path_factory.mktemp("logs") / "rollout-0.log"
    run_id = f"test-{os.getpid()}"
    actor = spawn(WatchedWorker, model_folder, log, run_id)
    try:
        info = ray.get(actor.start.remote(), timeout=300)
        ray.get(actor.sync.remote(publish(1)), timeout=120)
        yield Fleet(actor, info, log)
    finally:
        ray.kill(actor)
        remove_staged(run_id)


def test_a_started_worker_tells_its_processes_and_serves_what_it_loads(fleet: Fleet) -> None:
    assert fleet.call("progress").label == WeightLabel(0, 1)
    assert fleet.info.max_groups_in_flight == 4
    assert fleet.info.dtype == "float32"
    assert len(fleet.info.engine_pids) == 1
    assert all(psutil.pid_exists(pid) for pid in (fleet.info.pid, *fleet.info.engine_pids))
    assert "EngineCore" in fleet.log.read_text()


def test_groups_come_as_batches_behind_their_receipts(fleet: Fleet) -> None:
    fleet.sync()
    items = fleet.generate(request(7, 4), request(8, 2, attempt=3), request(9, 17))
    batches = {}
    while items:
        receipt = items.pop(0)
        assert isinstance(receipt, GroupReceipt)
        batches[receipt.group_id] = receipt, items.pop(0) if receipt.ok else None
    refused, nothing = batches.pop(9)
    assert "max_num_seqs 16" in refused.error
    assert nothing is None
    assert sorted(batches) == [7, 8]
    for receipt, batch in batches.values():
        validate(batch, verdicts=False)
        assert read_meta(batch) == META
        assert receipt.label == str(WeightLabel(0, fleet.version))
        assert receipt.samples == batch.num_rows
        offsets = tokens(batch, "response_ids")[1]
        assert receipt.response_tokens == tuple(np.diff(offsets).tolist())
        assert receipt.started_at <= receipt.finished_at
        assert_agrees(batch, model_of(fleet.version))
    assert batches[8][1].column("sample_id").to_pylist() == ["8-3-0", "8-3-1"]
    assert fleet.call("progress").groups_in_flight == 0


def test_a_sync_reports_and_moves_the_worker(fleet: Fleet) -> None:
    stream = fleet.actor.generate.remote([replace(request(i), n=16) for i in range(3)])
    fleet.until_tokens(10)
    report = fleet.sync()
    assert report.label == WeightLabel(0, fleet.version)
    assert report.parity is not None
    assert report.parity.passed
    assert report.parity.max_abs < AGREEMENT
    assert report.nbytes > 0
    assert 0 < report.load_s <= report.pause_s
    received = [ray.get(ref, timeout=120) for ref in stream]
    assert [r.ok for r in received if isinstance(r, GroupReceipt)] == [True] * 3
    receipt, batch = fleet.generate(request(10))
    assert receipt.label == str(report.label)
    assert_agrees(batch, model_of(fleet.version))


def test_results_are_held_back_until_the_probe_has_passed(fleet: Fleet) -> None:
    fleet.call("hold_probes", True)
    fleet.version += 1
    sync = fleet.actor.sync.remote(publish(fleet.version))
    while fleet.call("progress").label.version != fleet.version:
        time.sleep(0.01)
    stream = fleet.actor.generate.remote([request(11)])
    fleet.until_tokens(4)
    assert ray.wait([stream], timeout=1.5)[0] == []
    assert fleet.call("progress").groups_in_flight == 1
    fleet.call("hold_probes", False)
    assert ray.get(sync, timeout=120).parity.passed
    receipt, batch = (ray.get(ref, timeout=120) for ref in stream)
    assert receipt.ok
    assert_agrees(batch, model_of(fleet.version))


def test_a_stale_tensor_is_named_and_its_samples_are_quarantined(fleet: Fleet) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    old = tensors_of(model_of(fleet.version))[name]
    fleet.call("hold_probes", True)
    fleet.version += 1
    sync = fleet.actor.sync.remote(publish(fleet.version, stale={name: old}))
    while fleet.call("progress").label.version != fleet.version:
        time.sleep(0.01)
    held = fleet.actor.generate.remote([request(12)])
    fleet.until_tokens(4)
    fleet.call("hold_probes", False)
    report = ray.get(sync, timeout=120)
    assert not report.parity.passed
    assert report.parity.cause == TENSORS
    for items in ([ray.get(ref, timeout=120) for ref in held], fleet.generate(request(13))):
        (receipt,) = items
        assert not receipt.ok
        assert receipt.error.startswith(f"rollout-0: quarantined: weights 0.{fleet.version}")
        assert TENSORS in receipt.error
    assert fleet.sync().parity.passed
    assert fleet.generate(request(14))[0].ok


def test_a_sync_that_changed_nothing_is_named(fleet: Fleet) -> None:
    served = fleet.version
    report = fleet.sync(model=model_of(served))
    assert report.parity is not None
    assert report.parity.cause == f"engine still serves the weights of version {served}"
    assert fleet.sync().parity.passed


def test_a_shift_by_one_is_named_by_probe_and_samples(fleet: Fleet) -> None:
    fleet.call("shift_logprobs", True)
    report = fleet.sync()
    batch = fleet.call("sample", [PROMPT, PROMPT[:20]], 4)
    fleet.call("shift_logprobs", False)
    assert report.parity is not None
    assert report.parity.cause == SHIFTED_BEHIND
    assert sample_check(batch, model_of(fleet.version)).cause == SHIFTED_AHEAD
    batch = fleet.call("sample", [PROMPT, PROMPT[:20]], 4)
    assert sample_check(batch, model_of(fleet.version)).passed
    short = fleet.call("sample", [PROMPT], 4, 2)
    assert np.diff(tokens(short, "response_ids")[1]).max() <= 2
    assert fleet.sync().parity.passed


def test_a_request_may_sample_at_a_temperature_of_its_own(fleet: Fleet) -> None:
    fleet.sync()
    receipt, batch = fleet.generate(replace(request(70, 4), temperature=1.0))
    assert receipt.ok and TEMPERATURE != 1.0
    assert batch.column("temperature").to_pylist() == [1.0] * 4
    for row in batch.to_pylist():
        expected = response_logprobs(
            model_of(fleet.version), row["prompt_ids"], row["response_ids"], 1.0
        )
        np.testing.assert_allclose(row["behavior_logprobs"], expected, rtol=0, atol=AGREEMENT)


def test_the_engine_s_own_metrics_reach_ray_s_exporter(fleet: Fleet) -> None:
    fleet.generate(request(71, 4))
    (node,) = ray.nodes()
    page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    end = time.monotonic() + 120
    while True:
        with urllib.request.urlopen(page, timeout=30) as answer:
            text = answer.read().decode()
        if found := re.findall(r"^ray_vllm_generation_tokens_total\{.*\} (\S+)$", text, re.M):
            break
        assert time.monotonic() < end, "no ray_vllm_generation_tokens_total"
        time.sleep(1)
    assert max(map(float, found)) > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"ray_vllm_{name}" in text


def sample_check(batch: pa.RecordBatch, model: LlamaForCausalLM) -> ParityReport:
    rows = batch.select(["prompt_ids", "response_ids"]).to_pylist()

    def costs(temperature: float) -> np.ndarray:
        return np.concatenate(
            [
                response_logprobs(model, r["prompt_ids"], r["response_ids"], temperature)
                for r in rows
            ]
        )

    behavior, offsets = tokens(batch, "behavior_logprobs")
    return check_samples(behavior, costs(TEMPERATURE), costs(1.0), offsets, 1e-3)


def test_the_newest_of_several_syncs_wins(fleet: Fleet) -> None:
    @ray.remote(num_cpus=0)
    def never() -> None:
        time.sleep(3600)

    stuck, newest = publish(fleet.version + 1), publish(fleet.version + 2)
    blocked = never.remote()
    stuck = replace(stuck, refs=(blocked, *stuck.refs[1:]))
    first = fleet.actor.sync.remote(stuck)
    assert ray.wait([first], timeout=0.5)[0] == []
    report = fleet.call("sync", newest)
    fleet.version += 2
    assert report.label == newest.label
    assert not report.superseded
    assert ray.get(first, timeout=120).superseded
    assert fleet.call("sync", publish(fleet.version - 1)).superseded
    assert fleet.call("progress").label == newest.label
    ray.cancel(blocked, force=True)


def test_a_damaged_chunk_is_refused_and_the_worker_serves_on(fleet: Fleet) -> None:
    good = publish(fleet.version + 1)
    damaged = ray.get(good.refs[0]).copy()
    damaged[-1] ^= 1
    with pytest.raises(WeightStagingError, match=r"chunk 0.*CRC-32"):
        fleet.call("sync", replace(good, refs=(ray.put(damaged), *good.refs[1:])))
    receipt, batch = fleet.generate(request(15))
    assert receipt.label == str(WeightLabel(0, fleet.version))
    assert_agrees(batch, model_of(fleet.version))
    assert fleet.sync().parity.passed


def test_a_killed_worker_is_an_error_at_the_caller(fleet: Fleet) -> None:
    """Ends the shared worker, so it stands last of those that use it."""
    stream = fleet.actor.generate.remote([replace(request(16), n=16)])
    fleet.until_tokens(16)
    os.kill(fleet.info.pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        for ref in stream:
            ray.get(ref, timeout=60)
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in fleet.info.engine_pids):
        assert time.monotonic() < deadline, "the engine outlived its worker"
        time.sleep(0.1)


def test_a_broken_engine_is_named_and_a_broken_load_ends_it(
    cluster: None, model_folder: str
) -> None:
    """In this process: an engine at vLLM's raw log-probabilities, then an incomplete update."""
    run_id = f"raw-{os.getpid()}"
    environment = dict(os.environ)
    worker = RawWorker("rollout-1", CONFIG, model_folder, model_folder, META, run_id, None)

    async def scenario() -> None:
        await worker.start()
        report = await worker.sync(publish(1))
        assert report.parity is not None
        assert report.parity.cause == RAW
        assert sample_check(await worker.sample([PROMPT], 4), model_of(1)).cause == RAW
        left_out = "model.layers.0.input_layernorm.weight"
        with pytest.raises(EngineError, match=left_out):
            await worker.sync(publish(2, without=left_out))
        async for receipt in worker.generate([request(1)]):
            assert not receipt.ok
            assert left_out in receipt.error

    async def scenario_and_end() -> None:
        try:
            await asyncio.wait_for(scenario(), 300)
        finally:
            await worker.close()

    try:
        asyncio.run(scenario_and_end())
    finally:
        os.environ.clear()
        os.environ.update(environment)
        remove_staged(run_id)


def test_a_model_that_does_not_load_says_why(cluster: None, tmp_path: Path) -> None:
    folder = save_model(model_of(0), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    log = tmp_path / "logs" / "worker.log"
    actor = spawn(RolloutWorker, str(folder), log, "no-run")
    try:
        with pytest.raises(EngineError, match="could not start") as caught:
            ray.get(actor.start.remote(), timeout=300)
    finally:
        ray.kill(actor)
    assert str(folder) in str(caught.value)
    assert str(log) in str(caught.value)
    assert "SafetensorError" in str(caught.value)
