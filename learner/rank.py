"""One learner rank: model, optimizer, kept versions and what the driver may ask of them.

A plain class that knows no Ray; `group.py` makes it an actor. Every rank of a group gets the same
calls in the same order, since each call takes collectives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils.logging import disable_progress_bar

from learner import checkpoint
from learner.batch import StepRequest, StepResult
from learner.batch_scoring import BatchScorer
from learner.collective import join, open_store
from learner.critic import Critic
from learner.export import export_hf
from learner.messages import (
    LearnerSpec,
    LearnerState,
    NotWritten,
    ProbeRequest,
    ProbeScores,
    Publication,
)
from learner.model import load_policy
from learner.optimizer import Optimizer
from learner.publisher import PublicationBuilder, iter_chunks
from learner.reference import Reference
from learner.rows import read_rows
from learner.scoring import Scorer
from learner.step import Fetch, Trainer
from learner.versions import VersionStore


class LearnerRank:
    """Rank `rank` of `world`. `fetch` turns references of a request into record batches."""

    def __init__(self, spec: LearnerSpec, rank: int, world: int, fetch: Fetch) -> None:
        self._spec = spec
        self._rank = rank
        self._world = world
        self._fetch = fetch
        self._meeting: TCPStore | None = None
        self._critic: Critic | None = None
        self.version = 0
        torch.set_num_threads(spec.config.threads)
        torch.manual_seed(spec.seed)
        disable_progress_bar()

    def open_meeting(self, ip: str) -> str:
        """On one rank before `start`: host:port at which all ranks then meet."""
        self._meeting = open_store(ip, self._spec.config.collective_timeout_s)
        return f"{ip}:{self._meeting.port}"

    def start(self, address: str, node_ip: str) -> None:
        """Meet the other ranks at `address` and load the model; ModelError if it does not load.
        `node_ip` is an address of this machine that the other ranks reach."""
        spec, config = self._spec, self._spec.config
        self._ranks, mesh = join(
            self._rank,
            self._world,
            self._meeting or address,
            node_ip,
            config.backend,
            config.collective_timeout_s,
        )
        self._policy = load_policy(spec.model, config, mesh)
        self._optimizer = Optimizer(self._policy, config.optimizer, config.schedule, self._ranks)
        self._store = VersionStore(
            self._policy, spec.objective.max_staleness or 0, getattr(torch, config.param_dtype)
        )
        self._scorer = Scorer(
            self._policy,
            self._store,
            self._ranks,
            token_budget=config.token_budget,
            chunk_tokens=config.logprob_chunk_tokens,
        )
        self._trainer = Trainer(
            self._policy,
            self._optimizer,
            self._store,
            self._batch_scorer(mesh),
            self._critic,
            self._ranks,
            config=config,
            objective=spec.objective,
            fetch=self._fetch,
        )

    def _batch_scorer(self, mesh: DeviceMesh) -> BatchScorer:
        """With a reference policy and a critic where the objective needs them."""
        spec, config, ranks = self._spec, self._spec.config, self._ranks
        reference = None
        if config.reference is not None and spec.objective.kl.coefficient:
            reference = Reference(spec.model, config.reference, config, mesh, self._scorer, ranks)
        if spec.objective.needs_critic:
            path = config.value_model.path or spec.model
            self._critic = Critic(path, config.value_model, config, mesh, ranks)
        return BatchScorer(
            self._policy,
            self._store,
            self._scorer,
            ranks,
            config=config,
            reference=reference,
            critic=self._critic,
            max_response_tokens=spec.max_response_tokens,
        )

    def _parts(self) -> list[checkpoint.Part]:
        """What a checkpoint holds; the critic's tensors have names of their own."""
        parts = [checkpoint.Part("", self._policy.model, self._optimizer)]
        if self._critic is not None:
            parts.append(checkpoint.Part("critic.", self._critic.model, self._critic.optimizer))
        return parts

    def step(self, request: StepRequest) -> StepResult:
        """Train on one batch, see `Trainer.step`."""
        if request.version != self.version:
            raise ValueError(f"the learner is at version {self.version}, not {request.version}")
        result = self._trainer.step(request)
        self.version = result.version
        return result

    def publish(
        self, label: str, probe: ProbeRequest | None, version: int | None = None
    ) -> Iterator[np.ndarray | Publication]:
        """Rank 0 yields the chunks (uint8 arrays) of the weights of `version` in the rollout dtype,
        then the `Publication` that describes them; the others yield nothing. ValueError for a
        version that is neither the current one nor kept."""
        with self._under(version):
            yield from self._publish(label, probe)

    @contextmanager
    def _under(self, version: int | None) -> Iterator[None]:
        """The weights of `version` in place; the current ones for None."""
        if version is None or version == self.version:
            yield
            return
        if version not in self._store.versions:
            raise ValueError(
                f"version {version} is not kept; there are {self._store.versions} and, current, "
                f"{self.version}"
            )
        with self._store.borrowed() as load:
            load(version)
            yield

    def _publish(
        self, label: str, probe: ProbeRequest | None
    ) -> Iterator[np.ndarray | Publication]:
        dtype = getattr(torch, self._spec.rollout_dtype)
        leads = self._rank == 0
        builder = PublicationBuilder()
        for tensors in iter_chunks(self._policy, dtype, keep=leads):
            if tensors is not None:
                yield builder.add(tensors)
        scores = None
        if probe is not None:
            scores = ProbeScores(
                *self._scorer.next_tokens(probe.prefixes, probe.top_k, probe.temperature)
            )
        if leads:
            yield builder.finish(label, dtype, scores)

    def score(
        self, refs: Sequence[Any], version: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of every response token of these batches under the weights of
        `version`, by default the current ones; float32, flat in row order: at the sampling
        temperature, and at temperature 1. ValueError for a version that is not kept."""
        with self._under(version):
            return self._scorer.everything(read_rows(self._fetch(refs)))

    def save(self, folder: str, *, keep: int, export: bool) -> None:
        """Write a checkpoint, with an `hf/` export inside it if asked, and commit it. Raises
        NotWritten where that fails; older ones are as they were."""
        target = Path(folder)
        staging = checkpoint.staging_folder(target)
        state = LearnerState(self.version, self._optimizer.batches)

        def commit() -> None:
            if self._rank == 0:
                checkpoint.commit(target, keep=keep)

        try:
            checkpoint.save_state(staging, self._parts(), self._store, self._ranks, state)
            if export:
                self.export(str(staging / "hf"))
            self._ranks.together(checkpoint.writing(target, commit))
        except NotWritten:
            checkpoint.discard(target)
            raise

    def load(self, folder: str) -> LearnerState:
        """Continue from a checkpoint, with the versions that were kept then."""
        state = checkpoint.load_state(Path(folder), self._parts(), self._store, self._ranks)
        self.version = state.version
        return state

    def export(self, folder: str) -> None:
        """Write the current weights as a Hugging Face folder, in the rollout dtype."""
        dtype = getattr(torch, self._spec.rollout_dtype)
        export_hf(self._policy, self._spec.model, Path(folder), dtype, self._ranks)

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._meeting = None
