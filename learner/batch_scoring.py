"""What is known about a batch's response tokens before anything is trained on them.

Old log-probabilities under the version that sampled each token, how far behind that version is,
the reference's log-probabilities, and the advantage of each token. Runs in lockstep on all ranks.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from learner.batch import StepRequest
from learner.collective import Collective
from learner.config import LearnerConfig
from learner.credit import Credit, critic_credit, sample_credit
from learner.critic import Critic
from learner.kl import reward_penalties
from learner.model import Policy
from learner.objective_config import ObjectiveConfig
from learner.plan import BatchPlan, batch_rewards
from learner.reference import Reference
from learner.rows import Rows
from learner.scoring import Scorer
from learner.versions import VersionStore


@dataclass(frozen=True, eq=False)
class Scored:
    """Flat over the response tokens of a rank's rows; only those of its own samples are filled.

    `lags` int64; `old` (None: not needed; NaN: the current log-probability itself) and `reference`
    (None: no reference) float32.
    """

    lags: np.ndarray
    old: np.ndarray | None
    reference: np.ndarray | None
    credit: Credit


class BatchScorer:
    """Scores one batch at a time; `reference` and `critic` are there where the objective needs
    them."""

    def __init__(
        self,
        policy: Policy,
        store: VersionStore,
        scorer: Scorer,
        ranks: Collective,
        *,
        config: LearnerConfig,
        reference: Reference | None,
        critic: Critic | None,
        max_response_tokens: int,
    ) -> None:
        self._policy = policy
        self._store = store
        self._scorer = scorer
        self._ranks = ranks
        self._config = config
        self._reference = reference
        self._critic = critic
        self._max_response_tokens = max_response_tokens

    def score(
        self,
        request: StepRequest,
        plan: BatchPlan,
        rows: Rows,
        row_of: dict[int, int],
        objective: ObjectiveConfig,
    ) -> Scored:
        """All ranks call, each with its own rows. Raises ModelError at the first step when the
        reference is not what training starts from."""
        own = np.array(sorted(row_of.values()), np.int64)
        old, lags = self._old_logprobs(rows, own, request.version, objective)
        reference = None
        if self._reference is not None:
            reference = self._reference.logprobs(rows, own)
            if request.version == 0:
                self._reference.check_start(self._policy, reference, rows, own)
        penalties = None
        if reference is not None and objective.kl.place == "reward":
            assert old is not None
            known = rows.mask & ~np.isnan(old) & ~np.isnan(reference)
            penalties = reward_penalties(
                torch.from_numpy(old),
                torch.from_numpy(reference),
                torch.from_numpy(known),
                objective.kl.coefficient,
            ).numpy()
        credit = self._credit(request, plan, rows, row_of, penalties, objective)
        return Scored(lags, old, reference, credit)

    def _credit(
        self,
        request: StepRequest,
        plan: BatchPlan,
        rows: Rows,
        row_of: dict[int, int],
        penalties: np.ndarray | None,
        objective: ObjectiveConfig,
    ) -> Credit:
        if self._critic is None:
            return sample_credit(
                request,
                plan,
                rows,
                row_of,
                objective,
                self._max_response_tokens,
                penalties,
                self._ranks,
            )
        own = np.array(sorted(row_of.values()), np.int64)
        values = self._critic.values(rows, own)
        rewards = batch_rewards(request, objective, self._max_response_tokens)
        return critic_credit(rewards, rows, row_of, objective, values, penalties, self._ranks)

    def _old_logprobs(
        self, rows: Rows, own: np.ndarray, current: int, objective: ObjectiveConfig
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """p and lag of each response token of the rows `own`; others of `rows`, which came along
        in their groups, are not scored. NaN where p is the current log-probability itself; a
        token whose version is no longer kept gets a lag that makes it stale."""
        lags = current - rows.versions
        if not objective.needs_old:
            return None, lags
        now_too = self._config.optimizer_steps_per_batch > 1 or objective.kl.place == "reward"
        if objective.ratio.anchor == "step_start":
            rows = replace(rows, versions=np.full_like(rows.versions, current))
            versions = [current] if now_too else []
            return self._scorer.by_version(rows, own, current, versions), lags
        bound = objective.max_staleness or 0
        kept = [v for v in self._store.versions if v >= current - bound]
        old = self._scorer.by_version(rows, own, current, kept + [current] * now_too)
        unknown = np.isnan(old) & (lags > 0)
        return old, np.where(unknown, np.maximum(lags, bound + 1), lags)


def as_tensor(values: np.ndarray, index: np.ndarray, device: torch.device) -> torch.Tensor:
    """The flat `values` at `index`, on the device."""
    return torch.from_numpy(values[index]).to(device)
