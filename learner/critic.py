"""The critic: a value model of its own, with its own optimizer, trained beside the policy.

It predicts, at each position of a response, the reward still to come. Knows nothing of advantages
and clips: it gives values and takes a loss.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from learner.collective import Collective
from learner.config import LearnerConfig, ObjectiveConfig, ValueModelConfig
from learner.credit import Credit
from learner.model import decoder_layers, load_model, shard_module
from learner.optimizer import Optimizer
from learner.rows import PackedRow, Rows, dummy_row
from learner.scoring import micro_batches
from learner.token_batch import Normalizer
from learner.value import value_loss


class ValueModel(nn.Module):
    """The body of a language model with one output: the value of each predicting position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = model.base_model
        self.layers = decoder_layers(model)
        width = model.get_output_embeddings().weight.shape[1]
        # Zero: until it has learnt something its advantages are the returns themselves.
        self.head = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, row: PackedRow) -> Tensor:
        """float32 [M]: the value before each target of the row."""
        output = self.body(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            packing=row.packing,
        )
        hidden = output.last_hidden_state[0].index_select(0, row.predictors)
        # A copy: FSDP hangs its backward hook on the output, and a view would lose it.
        return self.head(hidden).squeeze(-1).float().clone()


class Critic:
    """A sharded value model and its optimizer."""

    def __init__(
        self,
        path: str | Path,
        value_model: ValueModelConfig,
        config: LearnerConfig,
        mesh: DeviceMesh,
        ranks: Collective,
    ) -> None:
        """Raises ModelError when the model in `path` does not load."""
        model = ValueModel(load_model(path, torch.float32).eval())
        self.model = shard_module(model, model.layers, config, mesh)
        self.optimizer = Optimizer(self.model, value_model.optimizer, config.schedule, ranks)
        self._token_budget = config.token_budget
        self._ranks = ranks

    def values(self, rows: Rows, samples: np.ndarray) -> np.ndarray:
        """float32 over the response tokens of all `rows`: those of `samples`, NaN elsewhere. All
        ranks call."""
        found = np.full(len(rows.behavior), np.nan, np.float32)
        with torch.no_grad():
            for row, index in micro_batches(rows, samples, self._token_budget, self._ranks):
                found[index] = self.model(row).cpu().numpy()
        return found

    def learn(
        self,
        row: PackedRow,
        index: np.ndarray,
        credit: Credit,
        mask: Tensor,
        objective: ObjectiveConfig,
        count: Normalizer,
    ) -> Tensor:
        """Backward of the value loss of one micro-batch; its share of the batch's loss, detached.

        `index` says where the row's tokens lie in `credit`; `mask` is the data mask, bool [M].
        """
        assert credit.returns is not None and credit.values is not None
        device = self._ranks.device
        loss, _ = value_loss(
            self.model(row),
            torch.from_numpy(credit.values[index]).to(device),
            torch.from_numpy(credit.returns[index]).to(device),
            mask,
            count.tokens,
            objective.critic.value_clip,
        )
        # FSDP averages gradients over ranks; the loss is a share of one sum.
        (loss * self._ranks.world).backward()
        return loss.detach()

    def take_part(self) -> None:
        """The collectives of a forward and backward pass, for a rank without samples."""
        self.model(dummy_row(self._ranks.device)).sum().backward()
