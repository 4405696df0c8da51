"""One vLLM engine: groups of prompts in, tokens with log-probabilities and version spans out.

It owns the rules that keep sampling and weights consistent: a request carries the weight label as
cache salt from dispatch, none waits unscheduled across an update, and spans say which weights
sampled which token. It knows nothing of Ray, of groups' identities, or of how weights arrive.
"""

import asyncio
import gc
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.config import EngineConfig, SamplingConfig
from actors.trajectory import FinishReason, VersionSpan, WeightLabel
from actors.vllm_setup import (
    engine_arguments,
    environment,
    ray_exporter,
    require_plugin,
    step_counter,
)

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

INITIAL_LABEL = WeightLabel(lineage=0, version=0)
# Probes run beside a full load of groups, so that a long response cannot delay a verdict on the
# weights that all results wait for.
_PROBE_SLOTS = 16
_SHUTDOWN_GRACE_S = 1.0


class EngineError(RuntimeError):
    """The engine cannot serve; `fatal` when only a new process can."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response of T tokens, the end-of-sequence token included where one was drawn."""

    token_ids: np.ndarray
    """int32 [T]"""
    logprobs: np.ndarray
    """float32 [T], natural log, at the sampling temperature"""
    spans: tuple[VersionSpan, ...]
    """tile [0, T)"""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Generation:
    """The completions of one request and the weights that served at its dispatch."""

    label: WeightLabel
    completions: list[Completion]


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds that generation stood still for one weight load, by stage."""

    pause_s: float
    load_s: float
    resume_s: float


class Engine:
    """vLLM's AsyncLLM with live weight updates. All methods belong to one event loop.

    `model` and `tokenizer` are folders or hub names. At most `config.max_num_seqs` samples are in
    flight; further `generate` calls wait for their turn.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str,
        config: EngineConfig,
        sampling: SamplingConfig,
        threads: int,
    ) -> None:
        self.label = INITIAL_LABEL
        self.tokens_generated = 0
        self.prefix_cache_hit_tokens = 0
        self.paused = False
        self.pause_to_token_s: float | None = None
        """Seconds from the last pause to the first token after it; None before there is one."""
        self._paused_at = 0.0
        self._model, self._tokenizer = model, tokenizer
        self._config, self._sampling, self._threads = config, sampling, threads
        self._llm: AsyncLLM | None = None
        self._failure: EngineError | None = None
        self._free_sequences = config.max_num_seqs
        self._changed = asyncio.Condition()
        self._in_flight: set[str] = set()
        self._alone = asyncio.Lock()
        self._probe_slots = asyncio.Semaphore(_PROBE_SLOTS)
        self._request_ids = itertools.count()

    async def start(self) -> None:
        """Brings the engine up on the weights in the model folder, labelled `INITIAL_LABEL`.

        Raises EngineError naming what could not be loaded. Sets environment variables of this
        process, which the engine's child processes inherit.
        """
        os.environ.update(environment(self._model, self._config, self._threads))
        try:
            require_plugin()
            await asyncio.to_thread(self._build)
            await self._running.update_weight_version(str(self.label))
            # vLLM asks once and keeps the answer. Later a dispatch must not yield between taking
            # its label and being known to `_restart_requests`.
            await self._running.get_supported_tasks()
        except Exception as error:
            raise EngineError(
                f"vLLM could not start on model {self._model!r}: {error}", fatal=True
            ) from error
        gc.collect()
        gc.freeze()

    async def close(self) -> None:
        """Ends the engine and its processes; requests in flight fail."""
        if self._llm is not None:
            await self._fail(EngineError("the engine was closed"))
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_GRACE_S)
            del llm
            gc.unfreeze()
            gc.collect()

    @property
    def dtype(self) -> str:
        """The precision the engine runs in, such as float32."""
        return str(self._running.model_config.dtype).removeprefix("torch.")

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The engine's own processes, in addition to this one."""
        manager = self._running.engine_core.resources.engine_manager
        return tuple(process.pid for process in manager.processes)

    @property
    def dead(self) -> bool:
        """Whether only a new process can serve again."""
        return (self._failure is not None and self._failure.fatal) or (
            self._llm is not None and self._llm.errored
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        n: int,
        seed: int | None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Generation:
        """Samples `n` responses to one prompt of token ids; limit and temperature are the
        configured ones unless given.

        With `seed`, sample i draws from seed + i, whatever else runs. Raises ValueError for a
        prompt that leaves no room for a response, EngineError when the engine cannot serve.
        """
        draw = partial(self._generate, prompt_ids, max_tokens=max_tokens, temperature=temperature)
        if not self._config.one_at_a_time:
            return await draw(n, seed)
        async with self._alone:
            parts = [await draw(1, None if seed is None else seed + i) for i in range(n)]
        return Generation(parts[0].label, [part.completions[0] for part in parts])

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        n: int,
        seed: int | None,
        *,
        max_tokens: int | None,
        temperature: float | None,
    ) -> Generation:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if seed is not None and self._config.chunked_prefill:
            raise ValueError("seeded requests need engine.chunked_prefill = false")
        if not 1 <= n <= self._config.max_num_seqs:
            raise ValueError(f"n = {n} lies outside [1, max_num_seqs {self._config.max_num_seqs}]")
        params = SamplingParams(
            n=n,
            seed=seed,
            temperature=self._sampling.temperature if temperature is None else temperature,
            max_tokens=self._response_room(prompt_ids, max_tokens or self._sampling.max_tokens),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        while True:
            label = await self._enter(n)
            try:
                output = await self._request(prompt_ids, params, label)
            finally:
                await self._leave(n)
            if output is not None:
                return Generation(label, [_completion(o, label) for o in output.outputs])

    async def next_token_logprobs(
        self, prefixes: Sequence[Sequence[int]], k: int
    ) -> list[dict[int, float]]:
        """For each prefix, the log-probabilities of at least the `k` most likely next tokens.

        They come from the sampling path itself: same temperature, same processing, same cache
        rules as `generate`.
        """
        return list(await asyncio.gather(*(self._next_token(prefix, k) for prefix in prefixes)))

    async def load(self, files: Sequence[Path], label: WeightLabel) -> LoadTimes:
        """Replaces the weights by those in the safetensors `files` and serves them as `label`.

        Requests in flight continue on their cached keys and values; those that had not produced a
        token start over under the new label, and so do all when the lineage changes. Raises
        EngineError, fatal, when the update fails: the model may be half old, half new.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._running
        self.paused = True
        try:
            start = time.perf_counter()
            await llm.pause_generation(mode="keep", clear_cache=False)
            await self._restart_requests(everything=label.lineage != self.label.lineage)
            paused = time.perf_counter()
            await llm.start_weight_update()
            update = WeightTransferUpdateRequest(update_info={"paths": [str(f) for f in files]})
            await llm.update_weights(update)
            await llm.finish_weight_update(str(label))
            loaded = time.perf_counter()
            self.label = label
            # Without a request in flight no token was kept waiting.
            self._paused_at = start if self._in_flight else 0.0
            self.pause_to_token_s = None
            await llm.resume_generation()
            resumed = time.perf_counter()
        except BaseException as error:
            cause = str(error) or type(error).__name__
            failure = EngineError(f"loading weights {label} failed: {cause}", fatal=True)
            await self._fail(failure)
            raise failure from error
        finally:
            self.paused = False
            await self._notify()
        return LoadTimes(paused - start, loaded - paused, resumed - loaded)

    def engine_arguments(self) -> "AsyncEngineArgs":
        """What vLLM is started with."""
        return engine_arguments(
            self._model, self._tokenizer, self._config, reserved_sequences=_PROBE_SLOTS
        )

    @property
    def _running(self) -> "AsyncLLM":
        if self._failure is not None:
            raise self._failure
        if self._llm is None:
            raise EngineError("the engine is not running")
        return self._llm

    def _build(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        loggers = [step_counter(self._count)]
        if self._config.export_metrics:
            loggers += ray_exporter()
        self._llm = AsyncLLM.from_engine_args(self.engine_arguments(), stat_loggers=loggers)

    def _count(self, generated_tokens: int, cache_hit_tokens: int) -> None:
        self.tokens_generated += generated_tokens
        if generated_tokens and self.pause_to_token_s is None and self._paused_at:
            self.pause_to_token_s = time.perf_counter() - self._paused_at
        self.prefix_cache_hit_tokens += cache_hit_tokens

    def _response_room(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        limit = self._running.model_config.max_model_len
        room = limit - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens does not fit max_model_len {limit} with "
                "at least one prompt and one response token"
            )
        return min(max_tokens, room)

    async def _enter(self, n: int) -> WeightLabel:
        def ready() -> bool:
            return not self.paused and self._free_sequences >= n

        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or ready())
            if self._failure is not None:
                raise self._failure
            self._free_sequences -= n
            return self.label

    async def _leave(self, n: int) -> None:
        self._free_sequences += n
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _request(
        self, prompt_ids: Sequence[int], params: Any, label: WeightLabel
    ) -> "RequestOutput | None":
        """The final output; None when the request was taken back and has to start over."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id = str(next(self._request_ids))
        prompt = tokens_input(list(prompt_ids), cache_salt=str(label))
        self._in_flight.add(request_id)
        try:
            async for output in self._running.generate(prompt, params, request_id):
                final = output
        except (EngineDeadError, EngineGenerateError) as error:
            fatal = isinstance(error, EngineDeadError) or self.dead
            raise EngineError(
                f"vLLM failed: {error or type(error).__name__}", fatal=fatal
            ) from error
        finally:
            self._in_flight.discard(request_id)
        if self._failure is not None:
            raise self._failure
        return None if any(o.finish_reason == "abort" for o in final.outputs) else final

    async def _next_token(self, prefix: Sequence[int], k: int) -> dict[int, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._response_room(prefix, 1)
        params = SamplingParams(
            temperature=self._sampling.temperature,
            max_tokens=1,
            logprobs=k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self._probe_slots:
            while True:
                label = await self._enter(0)
                output = await self._request(prefix, params, label)
                if output is not None:
                    flat = _flat_logprobs(output.outputs[0])
                    return dict(zip(flat.token_ids, flat.logprobs, strict=True))

    async def _restart_requests(self, *, everything: bool) -> None:
        """Takes back requests with a sample that has no token yet. Scheduled after the update,
        such a sample would read its prompt's keys and values of the old weights from the cache,
        under spans that name the new ones alone."""
        processor = self._running.output_processor
        for request_id in list(self._in_flight):
            children = processor.external_req_ids.get(request_id, ())
            if everything or any(processor.request_states[c].is_prefilling for c in children):
                await self._running.abort(request_id)

    async def _fail(self, failure: EngineError) -> None:
        """Refuses all further requests and ends those in flight."""
        self._failure = self._failure or failure
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort(list(self._in_flight))
        await self._notify()


def _completion(output: "CompletionOutput", dispatched: WeightLabel) -> Completion:
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    # With logprobs=0 a position holds the sampled token alone, so the flat list is per token.
    logprobs = np.asarray(_flat_logprobs(output).logprobs, dtype=np.float32)
    if logprobs.shape != token_ids.shape:
        raise EngineError(f"vLLM returned {len(logprobs)} values for {len(token_ids)} tokens")
    labels = [(WeightLabel.parse(s.version), s) for s in output.weight_versions or ()]
    if not labels or labels[0][0] != dispatched:
        raise EngineError(f"a request dispatched under {dispatched} was sampled as {labels}")
    spans = tuple(VersionSpan(label.version, s.start, s.end) for label, s in labels)
    return Completion(token_ids, logprobs, spans, FinishReason(output.finish_reason or ""))


def _flat_logprobs(output: "CompletionOutput") -> "FlatLogprobs":
    from vllm.logprobs import FlatLogprobs

    if not isinstance(output.logprobs, FlatLogprobs):
        raise EngineError(f"vLLM returned {type(output.logprobs).__name__} for log-probabilities")
    return output.logprobs
