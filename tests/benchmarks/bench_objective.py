"""The objective on a million tokens, forward and backward, against masked means over one `exp`.

"With diagnostics" is the default call. There are two yardsticks on the same tensors: a plain one,
which multiplies by the mask and would make NaN of padding that is NaN, and a safe one, which masks
before `exp` as the objective must. Process time on one thread, so that other work on the machine
counts little.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from learner.advantages import gae
from learner.objective import TokenBatch, evaluate, preset
from tests.benchmarks.figures import Figure, Figures, interleaved

TOKENS, SAMPLES = 1_000_000, 4_000
CHOICES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "dapo, icepop": {"correction": "icepop"},
}


def run(quick: bool) -> Figures:
    """Per preset: times the yardsticks, with and without diagnostics; and GAE's share."""
    torch.set_num_threads(1)
    logprobs, batch = _batch(TOKENS, SAMPLES)
    measures = [
        lambda: {"plain": _seconds(logprobs, lambda: _plain_mean(logprobs, batch))},
        lambda: {"safe": _seconds(logprobs, lambda: _safe_mean(logprobs, batch))},
        lambda: {"gae": _seconds(None, lambda: _gae(batch))},
    ]
    for name, overrides in CHOICES.items():
        for diagnostics in (False, True):
            measures.append(_measure(name, overrides, logprobs, batch, diagnostics))
    rounds = interleaved(*measures, repeats=3 if quick else 11)
    plain, safe = Figure(rounds["plain"], "s"), Figure(rounds["safe"], "s")
    figures = {"plain masked mean": _milliseconds(plain), "safe masked mean": _milliseconds(safe)}
    for name in CHOICES:
        for what in ("gradient", "with diagnostics"):
            figure = Figure(rounds[f"{name}: {what}"], "s")
            figures[f"{name}: {what}"] = _milliseconds(figure)
            figures[f"{name}: {what}, per plain mean"] = figure.per(plain)
            figures[f"{name}: {what}, per safe mean"] = figure.per(safe)
    return figures | {"gae, 100,000 samples": _milliseconds(Figure(rounds["gae"], "s"))}


def _measure(
    name: str, overrides: dict[str, Any], logprobs: Tensor, batch: TokenBatch, diagnostics: bool
) -> Callable[[], Mapping[str, float]]:
    config = preset(name.split(",")[0], {**overrides, "max_staleness": 2})
    key = f"{name}: {'with diagnostics' if diagnostics else 'gradient'}"

    def work() -> Tensor:
        return evaluate(config, logprobs, batch, diagnostics=diagnostics).loss

    return lambda: {key: _seconds(logprobs, work)}


def _batch(tokens: int, samples: int) -> tuple[Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(samples).repeat_interleave(tokens // samples)
    old = -3 * torch.rand(tokens, generator=generator)
    logprobs = (old + 0.1 * torch.randn(tokens, generator=generator)).requires_grad_()
    mask = torch.rand(tokens, generator=generator) > 0.05
    advantages = torch.randn(samples, generator=generator)[index]
    lag = torch.randint(0, 3, (samples,), generator=generator)[index]
    behavior = old - 0.02 * torch.randn(tokens, generator=generator)
    batch = TokenBatch(index, mask, behavior, old, advantages, samples, version_lag=lag)
    return logprobs, batch


def _plain_mean(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    assert batch.old_logprobs is not None
    return ((logprobs - batch.old_logprobs).exp() * batch.mask).sum() / batch.mask.sum()


def _safe_mean(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    assert batch.old_logprobs is not None
    log_ratio = torch.where(batch.mask, logprobs - batch.old_logprobs, 0.0)
    return (log_ratio.exp() * batch.mask).sum() / batch.mask.sum()


def _gae(batch: TokenBatch) -> None:
    index = torch.arange(len(batch.mask)) // 10
    gae(batch.advantages, batch.behavior_logprobs, batch.mask, index, 1.0, 0.95)


def _seconds(leaf: Tensor | None, work: Callable[[], Tensor | None]) -> float:
    if leaf is not None:
        leaf.grad = None
    started = time.process_time()
    loss = work()
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started


def _milliseconds(figure: Figure) -> Figure:
    return Figure(tuple(1e3 * value for value in figure.values), "ms")
