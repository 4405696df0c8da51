"""Forward-only passes: log-probabilities of response tokens under current or kept weights.

All ranks call these together, each with its own samples; a rank that has fewer micro-batches than
another takes part with empty ones.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from learner.collective import Collective
from learner.model import Policy
from learner.packing import ragged_index, split_by_budget
from learner.rows import PackedRow, Rows, pack, pack_sequences
from learner.versions import VersionStore


class Scorer:
    """Scores rows with a policy, in micro-batches of at most `token_budget` tokens."""

    def __init__(
        self,
        policy: Policy,
        store: VersionStore,
        ranks: Collective,
        *,
        token_budget: int,
        chunk_tokens: int,
    ) -> None:
        self._policy = policy
        self._store = store
        self._ranks = ranks
        self._token_budget = token_budget
        self._chunk_tokens = chunk_tokens

    def by_version(
        self, rows: Rows, samples: np.ndarray, current: int, versions: Sequence[int]
    ) -> np.ndarray:
        """float32 over the response tokens of all `rows`: each token of `samples` under the
        version that sampled it, where that is one of `versions`; NaN elsewhere.

        `versions` are kept ones or `current`, the same on all ranks. A sample that crossed an
        update is scored once per version in it, up to the last token of that version.
        """
        scores = np.full(len(rows.behavior), np.nan, np.float32)
        if not versions:
            return scores
        jobs = {v: _Job(rows, samples, v, self._token_budget) for v in versions}
        own = torch.tensor([len(job) for job in jobs.values()], device=self._ranks.device)
        counts = dict(zip(versions, self._ranks.max(own).tolist(), strict=True))
        with self._policy.scoring(), self._store.borrowed() as load:
            for version in sorted(versions, key=lambda version: version != current):
                if counts[version] and version != current:
                    load(version)
                for number in range(counts[version]):
                    row, index = jobs[version].pack(number, self._ranks.device)
                    values = self._logprobs(row)
                    chosen = rows.versions[index] == version
                    scores[index[chosen]] = values[chosen]
        return scores

    def of_policy(self, policy: Policy, rows: Rows, samples: np.ndarray) -> np.ndarray:
        """float32 over the response tokens of all `rows`: those of `samples` under the present
        weights of `policy`, whichever it is; NaN elsewhere."""
        scores = np.full(len(rows.behavior), np.nan, np.float32)
        with policy.scoring():
            for row, index in micro_batches(rows, samples, self._token_budget, self._ranks):
                scores[index] = policy.logprobs(row, self._chunk_tokens)[0].float().cpu().numpy()
        return scores

    def everything(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of all response tokens of `rows` under the current weights, float32:
        at the sampling temperature, and at temperature 1. All ranks pass the same rows."""
        scaled, raw = (np.empty(len(rows.behavior), np.float32) for _ in range(2))
        everyone = np.flatnonzero(rows.response_lengths)
        job = _Job(rows, everyone, None, self._token_budget)
        with self._policy.scoring():
            for number in range(len(job)):
                row, index = job.pack(number, self._ranks.device)
                scaled[index] = self._logprobs(row)
                raw[index] = self._logprobs(row.at_temperature(1.0))
        return scaled, raw

    def next_tokens(
        self, prefixes: Sequence[Sequence[int]], top_k: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likeliest next tokens after each prefix (at least one token long) under the current
        weights: ids int32, log-probabilities at `temperature` and at 1 float32, [P, top_k] each.

        Prefixes of one another share a forward pass.
        """
        sequences, positions = _merge_prefixes(prefixes)
        row = pack_sequences(sequences, positions, self._ranks.device)
        with self._policy.scoring():
            ids, scaled, raw = self._policy.top_logprobs(
                row, temperature, top_k, self._chunk_tokens
            )
        return (
            ids.to(torch.int32).cpu().numpy(),
            scaled.float().cpu().numpy(),
            raw.float().cpu().numpy(),
        )

    def _logprobs(self, row: PackedRow) -> np.ndarray:
        return self._policy.logprobs(row, self._chunk_tokens)[0].float().cpu().numpy()


def micro_batches(
    rows: Rows, samples: np.ndarray, token_budget: int, ranks: Collective
) -> Iterator[tuple[PackedRow, np.ndarray]]:
    """The responses of `samples` in packed rows with their flat response indices: as many rows on
    every rank, empty ones where this rank has fewer."""
    job = _Job(rows, samples[rows.response_lengths[samples] > 0], None, token_budget)
    count = ranks.max(torch.tensor([len(job)], device=ranks.device))
    for number in range(int(count)):
        yield job.pack(number, ranks.device)


class _Job:
    """Micro-batches of the samples that have tokens of one version (None: of all samples).

    Each sample is read up to its last such token.
    """

    def __init__(
        self, rows: Rows, samples: np.ndarray, version: int | None, token_budget: int
    ) -> None:
        ends = rows.response_lengths
        if version is not None:
            owner = np.repeat(np.arange(len(ends)), ends)
            hits = np.flatnonzero(rows.versions == version)
            ends = np.zeros(len(ends), np.int64)
            # Of repeated indices the last assignment stays: the last token of the version.
            ends[owner[hits]] = hits - rows.response_starts[owner[hits]] + 1
            samples = samples[ends[samples] > 0]
        lengths = rows.prompt_lengths[samples] + ends[samples] - 1
        order = np.argsort(-lengths, kind="stable")
        runs = split_by_budget(order.tolist(), lengths.tolist(), token_budget)
        self._rows = rows
        self._ends = ends
        self._batches = [samples[run] for run in runs]

    def __len__(self) -> int:
        return len(self._batches)

    def pack(self, number: int, device: torch.device) -> tuple[PackedRow, np.ndarray]:
        """Micro-batch `number`, empty beyond the last, and its flat response indices."""
        rows = self._rows
        beyond = number >= len(self._batches)
        samples = np.zeros(0, np.int64) if beyond else self._batches[number]
        ends = self._ends[samples]
        index = ragged_index(rows.response_starts[samples], ends)
        return pack(rows, samples, device, ends), index


def _merge_prefixes(
    prefixes: Sequence[Sequence[int]],
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Maximal sequences, and for each prefix the (sequence, position) of its last token."""
    wanted = [tuple(prefix) for prefix in prefixes]
    if not all(wanted):
        raise ValueError("a probe prefix needs at least one token")
    sequences: list[tuple[int, ...]] = []
    home: dict[tuple[int, ...], tuple[int, int]] = {}
    for prefix in sorted(set(wanted), reverse=True):
        # In descending order a prefix comes after what extends it, with nothing else between.
        if not sequences or sequences[-1][: len(prefix)] != prefix:
            sequences.append(prefix)
        home[prefix] = (len(sequences) - 1, len(prefix) - 1)
    return sequences, [home[prefix] for prefix in wanted]
