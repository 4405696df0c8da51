"""Chunked log-probabilities and entropy against plain log-softmax: values, gradients, memory."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.logprobs import token_logprobs, top_logprobs

TOKENS, WIDTH, VOCABULARY = 23, 6, 37


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        temperature,
    )


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.t()) / temperature.to(hidden.dtype)[:, None]
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_values_and_gradients_match_plain_log_softmax(chunk: int) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)
    factors = torch.randn(2, TOKENS, dtype=torch.float64)
    outputs = token_logprobs(hidden, weight, targets, temperature, chunk)
    expected = plain(hidden, weight, targets, temperature)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-12, atol=1e-12)
    for chosen in ([0], [1], [0, 1]):
        grads = [
            torch.autograd.grad(
                sum((values[i] * factors[i]).sum() for i in chosen),
                (hidden, weight),
                retain_graph=True,
            )
            for values in (outputs, expected)
        ]
        for found, reference in zip(*grads, strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)
    few = [x[:4].detach().requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets[:4] % 4, temperature[:4], 3), few
    )


def test_half_precision_models_get_float32_log_probabilities() -> None:
    hidden, weight, targets, temperature = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, 7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, _ = plain(hidden.float(), weight.float(), targets, temperature)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0.05)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    sum(x.sum() for x in plain(*exact, targets, temperature)).backward()
    for half, full in zip((hidden, weight), exact, strict=True):
        assert (half.grad.float() - full.grad).norm() < 0.02 * full.grad.norm()


def test_head_weight_shared_with_the_embedding_gets_both_gradients() -> None:
    _, weight, targets, temperature = inputs(torch.float64)
    grads = []
    for head in (token_logprobs, lambda *args: plain(*args[:4])):
        weight.grad = None
        hidden = torch.nn.functional.embedding(targets.flip(0), weight).tanh()
        head(hidden, weight, targets, temperature, 5)[0].sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


class _LargestTensor(TorchDispatchMode):
    """Watches the size of every tensor that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_no_tensor_of_all_tokens_by_vocabulary_exists() -> None:
    hidden = torch.randn(400, 8, requires_grad=True)
    weight = torch.randn(300, 8, requires_grad=True)
    targets = torch.randint(300, (400,))
    with _LargestTensor() as watch:
        logprobs, entropy = token_logprobs(hidden, weight, targets, torch.ones(400), 16)
        (logprobs + entropy).sum().backward()
    assert watch.numel == 16 * 300


def test_no_tokens_still_give_zero_gradients() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0], temperature[:0], 4)
    logprobs.sum().backward()
    assert not weight.grad.any()


def test_top_logprobs_are_ordered_and_at_both_temperatures() -> None:
    hidden, weight, _, _ = inputs(torch.float32)
    ids, scaled, raw = top_logprobs(hidden, weight, 0.7, 5, 4)
    logits = (hidden @ weight.t()).detach()
    torch.testing.assert_close(raw, logits.log_softmax(-1).gather(1, ids))
    torch.testing.assert_close(scaled, (logits / 0.7).log_softmax(-1).gather(1, ids))
    assert torch.equal(ids, logits.topk(5).indices)
