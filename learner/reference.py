"""The reference policy: frozen, and scored once per batch.

Knows no objective: what is done with its log-probabilities is decided there.
"""

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from learner.collective import Collective
from learner.config import LearnerConfig, ReferenceConfig
from learner.messages import ModelError
from learner.model import Policy, load_frozen
from learner.rows import Rows
from learner.scoring import Scorer

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Nats by which two passes of one set of weights may differ, by the dtype of the forward pass."""


class Reference:
    """A policy of its own, sharded like the trained one."""

    def __init__(
        self,
        model: str,
        reference: ReferenceConfig,
        config: LearnerConfig,
        mesh: DeviceMesh,
        scorer: Scorer,
        ranks: Collective,
    ) -> None:
        """`model` is what training starts from. Raises ModelError when the reference does not
        load."""
        self._policy = load_frozen(reference.path or model, config, mesh, offload=reference.offload)
        self._starts_equal = reference.path in (None, model)
        self._scorer = scorer
        self._ranks = ranks
        self._tolerance = _TOLERANCE[getattr(torch, config.param_dtype)]

    def logprobs(self, rows: Rows, samples: np.ndarray) -> np.ndarray:
        """f, float32 over the response tokens of all `rows`: those of `samples`, NaN elsewhere."""
        return self._scorer.of_policy(self._policy, rows, samples)

    def check_start(
        self, policy: Policy, reference: np.ndarray, rows: Rows, samples: np.ndarray
    ) -> None:
        """Before the first step the KL to the reference must be 0: both are the same weights.

        All ranks call. Raises ModelError where they differ; a reference that was configured to be
        another model is not judged.
        """
        if not self._starts_equal:
            return
        current = self._scorer.of_policy(policy, rows, samples)
        differences = np.abs(current - reference)[rows.mask & ~np.isnan(current)]
        largest = float(differences.max()) if differences.size else 0.0
        worst = self._ranks.max(torch.tensor([largest], device=self._ranks.device)).item()
        if not worst <= self._tolerance:
            raise ModelError(
                f"the reference policy is not the one that training starts from: before the first "
                f"step their log-probabilities differ by {worst:.3g} (at most "
                f"{self._tolerance:g} expected), so the KL would not be 0. Set "
                "learner.reference.path if another reference is meant"
            )
