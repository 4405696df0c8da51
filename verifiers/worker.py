"""Scores rollout batches: tokens to text, text through a verifier, verdicts to Arrow.

A plain class; the orchestrator wraps it in a Ray actor. It knows nothing of queues, rewards
beyond a single completion, or training.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import ray

from actors.trajectory import VerdictRow, tokens, verdict_batch
from verifiers.config import VerifierConfig
from verifiers.pool import KillablePool
from verifiers.registry import resolve
from verifiers.scoring import score_inline
from verifiers.verdict import Question, Verdict, VerdictStatus

package = logging.getLogger("verifiers")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """The process that a verifier worker is; `node_id` is empty outside of Ray."""

    node_id: str
    pid: int


class VerifierWorker:
    """One verifier worker. `tokenizer` is a path or name that transformers can load."""

    def __init__(
        self, name: str, config: VerifierConfig, tokenizer: str, log_path: str | None = None
    ) -> None:
        self._name = name
        self._config = config
        self._tokenizer_name = tokenizer
        self._tokenizer: Any = None
        self._log_path = log_path
        self._log: logging.Handler | None = None
        self._scored = 0
        self._pool = KillablePool(
            config.processes,
            config.deadline_s,
            config.memory_limit_bytes,
            config.start_timeout_s,
        )

    async def start(self) -> VerifierInfo:
        """Load the tokenizer and start the pool. Raises whatever keeps either from working."""
        if self._log_path is not None:
            self._log = logging.FileHandler(self._log_path)
            self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            package.addHandler(self._log)
            package.setLevel(logging.INFO)
        self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._tokenizer_name)
        await self._pool.start()
        logger.info("%s is ready with %d processes", self._name, self._config.processes)
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return VerifierInfo(node, os.getpid())

    async def score(
        self, batch: pa.RecordBatch, question: Question, verifier: str
    ) -> pa.RecordBatch:
        """Verdict batch for a rollout batch of one task, in the order of its rows.

        Raises UnknownVerifierError for a name or import path that leads nowhere, and PoolClosed;
        whatever goes wrong inside the verifier is a status.
        """
        found = resolve(verifier)
        completions = self._decode(batch)
        if found.isolated:
            verdicts = await self._pool.score(found, question, completions)
        else:
            verdicts = await score_inline(found, question, completions, self._config.deadline_s)
        ids = batch.column("sample_id").to_pylist()
        rows = [_row(name, verdict) for name, verdict in zip(ids, verdicts, strict=True)]
        for row in rows:
            if row.status != VerdictStatus.OK:
                logger.warning("sample %s is %s: %s", row.sample_id, row.status, row.detail)
        self._scored += len(rows)
        return verdict_batch(rows)

    async def progress(self) -> int:
        """Samples scored so far, for whoever looks whether the worker still moves."""
        return self._scored

    async def close(self) -> None:
        """Kill the pool's processes."""
        await self._pool.close()
        if self._log is not None:
            package.removeHandler(self._log)
            self._log.close()

    def _decode(self, batch: pa.RecordBatch) -> list[str]:
        ids, offsets = tokens(batch, "response_ids")
        responses = [ids[start:end].tolist() for start, end in pairwise(offsets)]
        return self._tokenizer.batch_decode(
            responses, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _row(sample_id: str, verdict: Verdict) -> VerdictRow:
    return VerdictRow(
        sample_id=sample_id,
        reward=verdict.reward,
        outcome=verdict.outcome,
        parts=dict(verdict.parts),
        status=verdict.status,
        detail=verdict.detail,
        verify_s=verdict.seconds,
    )
