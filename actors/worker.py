"""The rollout worker: one engine as a Ray actor that turns tasks into trajectory batches.

It generates groups, follows the newest published weights, and holds back what it sampled under
weights whose parity probe has not passed. It knows nothing of staleness, retries or verifiers.
"""

import asyncio
import os
import re
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray

from actors.config import RolloutConfig
from actors.engine import Completion, Engine, EngineError, Generation
from actors.messages import GroupReceipt, GroupRequest, SyncReport, WorkerInfo, WorkerProgress
from actors.parity import ParityReport, ProbeExpectation, compare, tolerance
from actors.process_log import redirect_output
from actors.trajectory import RolloutSample, TrajectoryMeta, WeightLabel, rollout_batch, sample_id
from actors.weights import StagedFiles, WeightManifest, stage, staging_folder

# A plain async actor: Ray would give each concurrency group an event loop of its own, and the
# engine lives in one. Control calls never wait for data calls while fewer than this are pending.
MAX_CONCURRENCY = 1000
# What a dead worker has yielded needs a moment to reach its owner before the process ends.
_EXIT_DELAY_S = 1.0


class QuarantineError(RuntimeError):
    """Samples of weights that the engine does not serve faithfully."""


class RolloutWorker:
    """Wrap with `ray.remote(max_concurrency=MAX_CONCURRENCY)`, without concurrency groups.

    `model` and `tokenizer` are folders or hub names. With `log_path`, everything that this
    process and the engine's processes print goes to that file.
    """

    engine_class = Engine

    def __init__(
        self,
        name: str,
        config: RolloutConfig,
        model: str,
        tokenizer: str,
        meta: TrajectoryMeta,
        run_id: str,
        log_path: str | None = None,
    ) -> None:
        self._name, self._config, self._meta = name, config, meta
        self._run_id, self._log_path = run_id, log_path
        # Workers that shared a random stream would draw correlated samples.
        seed = zlib.crc32(f"{config.engine.seed}/{name}".encode())
        engine_config = config.engine.model_copy(update={"seed": seed})
        self._engine = self.engine_class(
            model, tokenizer, engine_config, config.sampling, config.threads
        )
        self._ready = asyncio.Event()
        self._loading = asyncio.Lock()
        self._wanted: WeightManifest | None = None
        self._staging: asyncio.Task[StagedFiles] | None = None
        self._last_sync: SyncReport | None = None
        self._expectation: ProbeExpectation | None = None
        self._proofs: dict[WeightLabel, asyncio.Future[str]] = {}
        self._groups_in_flight = 0

    async def start(self) -> WorkerInfo:
        """Brings the engine up, on the model's own weights; EngineError says what did not load."""
        if self._log_path is not None:
            redirect_output(self._log_path)
        try:
            await self._engine.start()
        except EngineError as error:
            raise EngineError(
                f"{self._name}: {error}{_last_error(self._log_path)}", fatal=True
            ) from error
        self._ready.set()
        return WorkerInfo(
            self._name,
            ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
            os.getpid(),
            self._engine.process_ids,
            self._config.max_groups_in_flight,
            self._engine.label,
            self._engine.dtype,
        )

    @ray.method(num_returns="streaming")
    async def generate(
        self, requests: Sequence[GroupRequest]
    ) -> AsyncIterator[GroupReceipt | pa.RecordBatch]:
        """Yields a receipt per group in order of completion, each followed by the group's batch
        when the receipt is ok. Nothing that fails raises: a receipt says so. After a failure that
        only a new process can mend, the actor exits once its receipts are out."""
        tasks = [asyncio.ensure_future(self._group(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                receipt, batch = await finished
                yield receipt
                if batch is not None:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            self._exit_if_dead()

    async def sync(self, manifest: WeightManifest, at_step_0: float | None = None) -> SyncReport:
        """Moves the engine to the weights of `manifest`; of several calls the newest label wins.

        Chunks are fetched while generating; generation stands still only for the load. A parity
        report that has not passed means that this label is quarantined: what was or will be
        sampled under it comes back as failed groups. `at_step_0` is the difference that the probe
        showed before the first step, see `parity.tolerance`. Raises TimeoutError naming the
        stage, EngineError when the engine did not survive the load.
        """
        if self._wanted is not None and manifest.label < self._wanted.label:
            return SyncReport(self._engine.label, superseded=True)
        self._wanted = manifest
        if self._staging is not None:
            self._staging.cancel()
        start = time.perf_counter()
        files = await self._stage(manifest)
        stage_s = time.perf_counter() - start
        if files is None:
            return SyncReport(self._engine.label, superseded=True)
        await self._ready.wait()
        async with self._loading:
            if self._wanted is not manifest:
                return SyncReport(self._engine.label, superseded=True)
            if self._last_sync is None or self._last_sync.label != manifest.label:
                report = await self._load(manifest, files, at_step_0)
                self._last_sync = replace(report, stage_s=stage_s)
            return self._last_sync

    async def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int | None = None
    ) -> pa.RecordBatch:
        """`n` samples of each prompt under the weights served now, of up to `max_tokens` (default:
        the configured limit); the group id is the prompt's position. For comparing behavior
        log-probabilities with the learner's."""
        requests = [
            GroupRequest(i, f"probe-{i}", tuple(prompt), n) for i, prompt in enumerate(prompts)
        ]
        started = time.time()
        generations = await asyncio.gather(
            *(
                self._engine.generate(request.prompt_ids, n, None, max_tokens=max_tokens)
                for request in requests
            )
        )
        rows = [
            row
            for request, generation in zip(requests, generations, strict=True)
            for row in self._rows(request, generation, started, time.time())
        ]
        lineage = generations[0].label.lineage
        return rollout_batch(rows, replace(self._meta, lineage=lineage))

    async def progress(self) -> WorkerProgress:
        """A cheap look; it also notices an engine that died while idle."""
        self._exit_if_dead()
        engine = self._engine
        return WorkerProgress(
            engine.tokens_generated, self._groups_in_flight, engine.label, engine.paused
        )

    async def close(self) -> None:
        """Ends the engine and its processes."""
        if self._staging is not None:
            self._staging.cancel()
        await self._engine.close()

    async def _group(self, request: GroupRequest) -> tuple[GroupReceipt, pa.RecordBatch | None]:
        started = time.time()
        label = self._engine.label
        self._groups_in_flight += 1
        try:
            if not self._engine.dead:  # else it says itself why
                self._refuse_disproven(label)
            generation = await self._engine.generate(
                request.prompt_ids, request.n, request.seed, temperature=request.temperature
            )
            finished, label = time.time(), generation.label
            await self._all_proven(generation)
            rows = self._rows(request, generation, started, finished)
            batch = rollout_batch(rows, replace(self._meta, lineage=label.lineage))
        except Exception as error:
            cause = f"{self._name}: {_sentence(error)}"
            return self._receipt(request, label, started, error=cause), None
        finally:
            self._groups_in_flight -= 1
        receipt = self._receipt(request, label, started)
        lengths = tuple(len(c.token_ids) for c in generation.completions)
        return (
            replace(
                receipt,
                finished_at=finished,
                samples=len(rows),
                response_tokens=lengths,
            ),
            batch,
        )

    def _receipt(
        self, request: GroupRequest, label: WeightLabel, started: float, error: str = ""
    ) -> GroupReceipt:
        return GroupReceipt(
            group_id=request.group_id,
            attempt=request.attempt,
            ok=not error,
            label=str(label),
            started_at=started,
            finished_at=time.time(),
            error=error,
        )

    def _rows(
        self, request: GroupRequest, generation: Generation, started: float, finished: float
    ) -> list[RolloutSample]:
        temperature = request.temperature
        if temperature is None:
            temperature = self._config.sampling.temperature

        def row(index: int, completion: Completion) -> RolloutSample:
            return RolloutSample(
                sample_id=sample_id(request.group_id, request.attempt, index),
                group_id=request.group_id,
                task_id=request.task_id,
                sample_index=index,
                attempt=request.attempt,
                prompt_ids=request.prompt_ids,
                response_ids=completion.token_ids,
                behavior_logprobs=completion.logprobs,
                loss_mask=np.ones(len(completion.token_ids), dtype=bool),
                version_spans=completion.spans,
                finish_reason=completion.finish_reason,
                worker=self._name,
                started_at=started,
                finished_at=finished,
                temperature=temperature,
                seed=None if request.seed is None else request.seed + index,
            )

        return [row(i, completion) for i, completion in enumerate(generation.completions)]

    async def _all_proven(self, generation: Generation) -> None:
        spans = {span.version for c in generation.completions for span in c.spans}
        for version in sorted(spans):
            await self._proven(WeightLabel(generation.label.lineage, version))

    def _refuse_disproven(self, label: WeightLabel) -> None:
        proof = self._proofs.get(label)
        if proof is not None and proof.done() and (cause := proof.result()):
            raise QuarantineError(f"quarantined: weights {label}: {cause}")

    async def _proven(self, label: WeightLabel) -> None:
        """Returns once the probe of `label` has passed; a label without a proof had none to pass.
        Raises QuarantineError."""
        proof = self._proofs.get(label)
        if proof is not None:
            await asyncio.wait([proof])
            self._refuse_disproven(label)

    async def _stage(self, manifest: WeightManifest) -> StagedFiles | None:
        """The chunk files on this node, or None when a newer label was asked for meanwhile."""
        folder = staging_folder(self._run_id, manifest)
        self._staging = asyncio.ensure_future(stage(manifest, _fetch, folder))
        try:
            async with asyncio.timeout(self._config.sync_timeout_s):
                return await self._staging
        except asyncio.CancelledError:
            if self._wanted is manifest:
                raise
            return None
        except TimeoutError:
            raise TimeoutError(self._late("fetching", manifest)) from None

    async def _load(
        self, manifest: WeightManifest, files: StagedFiles, at_step_0: float | None
    ) -> SyncReport:
        label = manifest.label
        proof = self._proofs[label] = asyncio.get_running_loop().create_future()
        cause = "its sync was interrupted"
        doing = "loading"
        deadline = asyncio.timeout(self._config.sync_timeout_s)
        try:
            async with deadline:
                times = await self._engine.load(files, label)
            loaded = time.perf_counter()
            doing = "probing"
            deadline = asyncio.timeout(self._config.sync_timeout_s)
            async with deadline:
                parity = await self._probe(manifest, at_step_0)
            cause = "" if parity is None or parity.passed else str(parity)
        except Exception as error:
            # The engine turns a cancelled load into an error of its own, so the type does not tell.
            if deadline.expired():
                cause = self._late(doing, manifest)
                raise TimeoutError(cause) from error
            cause = _sentence(error)
            raise
        finally:
            files.release()
            proof.set_result(cause)
            if not cause:
                del self._proofs[label]
            self._exit_if_dead()
        return SyncReport(
            label,
            pause_s=times.pause_s + times.load_s + times.resume_s,
            load_s=times.load_s,
            probe_s=time.perf_counter() - loaded,
            next_token_s=self._engine.pause_to_token_s,
            nbytes=manifest.total_bytes,
            parity=parity,
        )

    async def _probe(
        self, manifest: WeightManifest, at_step_0: float | None
    ) -> ParityReport | None:
        expected, previous = manifest.probe, self._expectation
        if expected is None:
            return None
        observed = await self._engine.next_token_logprobs(
            expected.prefixes, expected.token_ids.shape[1]
        )
        self._expectation = expected
        limit = tolerance(self._engine.dtype, expected.dtype, at_step_0)
        return compare(expected, observed, previous, limit)

    def _late(self, doing: str, manifest: WeightManifest) -> str:
        limit = self._config.sync_timeout_s
        return f"{self._name}: {doing} weights {manifest.label} took over {limit:g} s"

    def _exit_if_dead(self) -> None:
        """Lets Ray see a dead worker, so that the fleet replaces it."""
        if self._engine.dead and ray.is_initialized():
            actor = ray.get_runtime_context().get_actor_id()
            if actor is not None:
                asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)


async def _fetch(ref: "ray.ObjectRef[np.ndarray]") -> np.ndarray:
    return await ref


def _last_error(path: str | None) -> str:
    """The engine process's own account of a failed start: vLLM only logs it."""
    if path is None:
        return ""
    lines = Path(path).read_text(errors="replace").splitlines()
    errors = [m[0] for line in lines if (m := re.search(r"\b\w+(Error|Exception): .+", line))]
    said = f" ({errors[-1]})" if errors else ""
    return f"{said}; see {path}"


def _sentence(error: BaseException) -> str:
    known = isinstance(error, EngineError | QuarantineError | ValueError)
    return str(error) if known else f"{type(error).__name__}: {error}"
