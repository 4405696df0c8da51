"""The probe before step 1: does the rollout engine mean the same by a log-probability?

Samples a few held-out prompts through the workers' real path and lets the learner score the same
tokens under the same weights. A broken pair (temperature, shift by one, stale weights, dtype) is
refused with its likely cause instead of being trained on.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from actors.config import ProbeConfig
from actors.parity import ParityReport, check_samples, tolerance
from actors.trajectory import token_versions, tokens
from orchestrator.calls import within
from orchestrator.config import RunConfig
from orchestrator.errors import RunError
from orchestrator.supervised_learner import SupervisedLearner
from orchestrator.tasks import Task
from orchestrator.workers import Worker

SAMPLES_PER_PROMPT = 4
PROBE_TOKENS = 32
"""Longest response of the probe: it has to end in time however slow the engine is."""


def probe_prefixes(tasks: Sequence[Task], config: ProbeConfig) -> tuple[tuple[int, ...], ...]:
    """Token prefixes whose next-token log-probabilities are compared after every weight load.

    Each probe prompt as a whole, and cut at evenly spaced places, up to `config.positions` in all.
    """
    prompts = [task.prompt_ids for task in tasks[: config.prompts]]
    per_prompt = max(1, config.positions // max(1, len(prompts)))
    prefixes: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        for length in np.linspace(1, len(prompt), min(per_prompt, len(prompt)), dtype=int):
            prefixes[prompt[:length]] = None
    return tuple(prefixes)


async def check_pair(
    worker: Worker, learner: SupervisedLearner, tasks: Sequence[Task], config: RunConfig
) -> ParityReport:
    """Compare engine and learner on freshly sampled tokens. Raises RunError when they differ."""
    probe = config.rollout.probe
    prompts = [task.prompt_ids for task in tasks[: probe.prompts]]
    limit = min(PROBE_TOKENS, config.rollout.sampling.max_tokens)
    batch_ref = worker.actor.sample.remote(prompts, SAMPLES_PER_PROMPT, limit)
    batch: pa.RecordBatch = await within(
        batch_ref, config.rollout.progress_timeout_s, f"{worker.name} (start probe)"
    )
    # A schedule may have the workers serve an older version than the learner's.
    version = int(token_versions(batch).max())
    expected, raw = await learner.score([batch_ref], version)
    behavior, offsets = tokens(batch, "behavior_logprobs")
    allowed = tolerance(config.rollout.engine.dtype, config.learner.param_dtype, None)
    report = check_samples(behavior, expected, raw, offsets, allowed)
    if not report.passed:
        raise RunError(
            f"{worker.name} and the learner disagree before step 1: their log-probabilities of "
            f"the same tokens under the same weights differ by up to {report.max_abs:.3g} "
            f"(tolerance {report.tolerance:.3g}). Likely cause: {report.cause}."
        )
    return report
