"""Bias of each correction, by enumerating every response of a small tabular policy.

Responses over three symbols end with symbol 2 or at three tokens, so that lengths differ. The
learner's policy p and the engine's policy b are different tables; at c = p the expectation under b
of the objective's gradient is compared with the gradient of E_p[R].
"""

import itertools

import pytest
import torch

from learner.objective import Normalizer, TokenBatch, evaluate, preset

END, SYMBOLS = 2, 3
NO_CLIP = {"clip": {"kind": "none"}, "aggregation": {"kind": "sequence_sum"}}


class Enumeration:
    """All responses of up to `longest` tokens, flat, with one table row per prefix."""

    def __init__(self, longest):
        self.responses = [
            tokens
            for length in range(1, longest + 1)
            for tokens in itertools.product(range(SYMBOLS), repeat=length)
            if END not in tokens[:-1] and (tokens[-1] == END or length == longest)
        ]
        prefixes = {}
        for tokens in self.responses:
            for t in range(len(tokens)):
                prefixes.setdefault(tokens[:t], len(prefixes))
        flat = [
            (s, prefixes[r[:t]], r[t]) for s, r in enumerate(self.responses) for t in range(len(r))
        ]
        self.sample, self.row, self.symbol = torch.tensor(flat).T
        generator = torch.Generator().manual_seed(3)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.policy = normal(len(prefixes), SYMBOLS).requires_grad_()
        self.behavior = self.policy.detach() + 0.7 * normal(len(prefixes), SYMBOLS)
        self.rewards = normal(len(self.responses))

    def logprobs(self, table):
        return table.log_softmax(-1)[self.row, self.symbol]

    def probabilities(self, token_logprobs):
        total = token_logprobs.new_zeros(len(self.responses))
        return total.index_add(0, self.sample, token_logprobs).exp()

    def true_gradient(self):
        objective = (self.probabilities(self.logprobs(self.policy)) * self.rewards).sum()
        return torch.autograd.grad(objective, self.policy)[0]

    def expected_gradient(self, overrides):
        """E_b of minus the loss's gradient: each response's advantage is its reward times b."""
        current, behavior = self.logprobs(self.policy), self.logprobs(self.behavior)
        chances = self.probabilities(behavior)
        assert chances.sum().item() == pytest.approx(1.0)
        batch = TokenBatch(
            self.sample,
            torch.ones_like(self.sample, dtype=torch.bool),
            behavior,
            current.detach(),
            (self.rewards * chances)[self.sample],
            len(self.responses),
        )
        config = preset("grpo", NO_CLIP | overrides)
        loss = evaluate(config, current, batch, Normalizer(tokens=1, samples=1)).loss
        return -torch.autograd.grad(loss, self.policy)[0]

    def relative_bias(self, overrides):
        true = self.true_gradient()
        return ((self.expected_gradient(overrides) - true).norm() / true.norm()).item()


UNBIASED = {"correction": {"weight": "product", "cap": None}}


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_the_uncapped_sequence_product_is_unbiased(longest):
    enumeration = Enumeration(longest)
    torch.testing.assert_close(
        enumeration.expected_gradient(UNBIASED), enumeration.true_gradient(), rtol=1e-10, atol=1e-12
    )


def test_clipping_keeps_it_unbiased_at_the_first_step():
    clipped = UNBIASED | {"clip": {"kind": "ppo"}}
    assert Enumeration(3).relative_bias(clipped) < 1e-12


@pytest.mark.parametrize("weight", ["token", "geometric"])
def test_per_token_forms_are_exact_for_one_token_responses(weight):
    overrides = {"correction": {"weight": weight, "cap": None}}
    assert Enumeration(1).relative_bias(overrides) < 1e-12


@pytest.mark.parametrize(
    "correction",
    [
        "none",
        "tis",
        "icepop",
        {"weight": "token", "cap": None},
        {"weight": "geometric", "cap": None},
        {"weight": "product", "cap": 1.2},
        {"weight": "product", "cap": None, "keep": [{"statistic": "product", "high": 1.2}]},
    ],
    ids=str,
)
def test_every_other_form_is_biased_and_by_how_much(correction, record_property):
    bias = Enumeration(3).relative_bias({"correction": correction})
    record_property("relative_bias", bias)
    assert 1e-3 < bias < 2.0


def test_a_behavior_anchored_ratio_alone_is_unbiased_for_one_token_responses():
    overrides = {"ratio": {"anchor": "behavior"}, "correction": "none"}
    assert Enumeration(1).relative_bias(overrides) < 1e-12
