"""Injected faults are named: softmax policies over a small vocabulary, one fault at a time."""

import pytest
import torch

from learner.attribution import USUAL_MISMATCH, Cause, diagnose
from learner.objective import TokenBatch, evaluate, preset

TOKENS, HIDDEN, VOCABULARY, LAG = 3000, 32, 40, 3


def rounded(values):
    return values.bfloat16().double()


class Policies:
    """A linear softmax policy in `LAG + 1` versions, on fixed hidden states."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.hidden = self.normal(TOKENS, HIDDEN)
        self.versions = [self.normal(HIDDEN, VOCABULARY) * 2 / HIDDEN**0.5]
        for _ in range(LAG):
            self.versions.append(self.versions[-1] + 0.03 * self.normal(HIDDEN, VOCABULARY))

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def logprobs(self, version, temperature=1.0):
        return (self.hidden @ self.versions[version] / temperature).log_softmax(-1)

    def rounded_logprobs(self, version):
        logits = rounded(rounded(self.hidden) @ rounded(self.versions[version]))
        return logits.log_softmax(-1)

    def metrics(self, current, old, sampled, logged=None, lag=0, spoil=lambda b: b):
        tokens = torch.multinomial(sampled.exp(), 1, generator=self.generator)

        def of(table):
            return table.gather(1, tokens)[:, 0]

        behavior = spoil(of(sampled if logged is None else logged))
        index = torch.arange(TOKENS) // 30
        advantages = self.normal(TOKENS // 30)[index]
        lags = torch.full((TOKENS,), lag)
        batch = TokenBatch(
            index, index >= 0, behavior, of(old), advantages, TOKENS // 30, version_lag=lags
        )
        return evaluate(preset("dapo"), of(current), batch).metrics.finalise()


def inject(fault, seed):
    policies = Policies(seed)
    newest, oldest = policies.logprobs(-1), policies.logprobs(0)
    cases = {
        "nothing": {},
        "bf16 rollout": {"sampled": policies.rounded_logprobs(-1)},
        "stale": {"old": oldest, "sampled": oldest, "lag": LAG},
        "weights of an older version": {"sampled": oldest},
        "temperature 0.7": {"sampled": policies.logprobs(-1, 0.7)},
        "temperature 1.4": {"sampled": policies.logprobs(-1, 1.4)},
        "raw log-probabilities": {"logged": policies.logprobs(-1, 1.5)},
        "shift by one": {"spoil": lambda b: b.roll(1)},
        "constant": {"spoil": lambda b: b - 0.3},
    }
    usual = {"current": newest, "old": newest, "sampled": newest}
    return policies.metrics(**usual | cases[fault])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ("nothing", []),
        ("bf16 rollout", [Cause.PRECISION]),
        ("stale", [Cause.STALENESS]),
        ("weights of an older version", [Cause.OLD_WEIGHTS]),
        ("temperature 0.7", [Cause.TEMPERATURE]),
        ("temperature 1.4", [Cause.TEMPERATURE]),
        ("raw log-probabilities", [Cause.TEMPERATURE]),
        ("shift by one", [Cause.OTHER_TOKENS]),
        ("constant", [Cause.OFFSET]),
    ],
)
def test_an_injected_fault_is_named(fault, causes, seed):
    assert [finding.cause for finding in diagnose(inject(fault, seed), "float32")] == causes


def test_what_is_usual_depends_on_the_dtype():
    metrics = {"mismatch_abs_mean": 0.02}
    assert {dtype: bool(diagnose(metrics, dtype)) for dtype in USUAL_MISMATCH} == {
        "float32": True,
        "float16": True,
        "bfloat16": False,
        "fp8": False,
    }
    with pytest.raises(ValueError, match="unknown dtype 'int8'; known are float32"):
        diagnose(metrics, "int8")


def test_the_sentence_says_which_to_fix():
    (stale,) = diagnose({"movement_k3": 0.05, "mismatch_abs_mean": 1e-5}, "float32")
    assert stale.excess == pytest.approx(5.0)
    assert "staleness is out of its usual range" in stale.sentence
    assert "lower the staleness bound" in stale.sentence
    (mismatch,) = diagnose({"movement_k3": 1e-4, "mismatch_abs_mean": 0.01}, "float32")
    assert "engine mismatch is out of its usual range" in mismatch.sentence
    assert "precision" in mismatch.sentence


def test_the_larger_of_two_findings_comes_first():
    both = {"movement_k3": 0.02, "mismatch_abs_mean": 0.03}
    causes = [finding.cause for finding in diagnose(both, "float32")]
    assert causes == [Cause.PRECISION, Cause.STALENESS]


def test_what_was_not_measured_is_not_judged_and_nan_is_not_usual():
    assert diagnose({}, "bfloat16") == ()
    assert len(diagnose({"movement_k3": float("nan")}, "bfloat16")) == 1
