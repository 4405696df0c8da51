"""Log-probabilities and entropy from hidden states, without a [tokens, vocabulary] tensor.

Works in chunks of tokens: each chunk's logits exist only while it is being reduced, forward and
backward alike (they are computed again in backward). Logits, softmax and reductions are in
float32 at least, whatever the dtype of the model.
"""

from typing import Any

import torch
from torch import Tensor


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [C, E] and weight [V, E] → logits [C, V] in float32 at least."""
    if hidden.dtype in (torch.bfloat16, torch.float16) and hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    logits = torch.mm(hidden, weight.t())
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        shape = hidden.shape[:1]
        logprobs, entropy, log_sum = (hidden.new_empty(shape, dtype=wide) for _ in range(3))
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = project(hidden[part], weight).mul_(inverse_temperature[part, None])
            log_sum[part] = torch.logsumexp(logits, 1)
            at_target = logits.gather(1, targets[part, None]).squeeze(1)
            logprobs[part] = at_target - log_sum[part]
            weights = logits.sub(log_sum[part, None]).exp_()
            entropy[part] = log_sum[part] - weights.mul_(logits).sum(1)
        ctx.save_for_backward(hidden, weight, targets, inverse_temperature, entropy, log_sum)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d log p_y = onehot_y - p; d entropy = -p (log p + entropy); both divided by T."""
        hidden, weight, targets, inverse_temperature, entropy, log_sum = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = project(hidden[part], weight).mul_(inverse_temperature[part, None])
            log_softmax = logits.sub_(log_sum[part, None])
            probabilities = log_softmax.exp()
            grad = torch.zeros_like(log_sum[part])[:, None]
            if grad_entropy is not None:
                grad = grad - log_softmax.add_(entropy[part, None]) * grad_entropy[part, None]
            if grad_logprobs is not None:
                grad = grad - grad_logprobs[part, None]
            grad_logits = probabilities.mul_(grad)
            if grad_logprobs is not None:
                grad_logits.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad_logits.mul_(inverse_temperature[part, None])
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden[part])
            else:
                grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both float [M].

    hidden [M, E] predicts targets int64 [M] through the head weight [V, E]; logits are divided by
    temperature [M] (> 0). Both outputs carry gradients to hidden and weight. At most
    `chunk_tokens` rows of logits exist at once.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    inverse = temperature.to(wide).reciprocal()
    return _TokenLogprobs.apply(hidden, weight, targets, inverse, chunk_tokens)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, weight: Tensor, temperature: float, top_k: int, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `top_k` likeliest tokens of each row of hidden [M, E], likeliest first.

    Returns ids int64, log-probabilities at `temperature` and at temperature 1, each [M, top_k].
    """
    parts = []
    for rows in hidden.split(chunk_tokens):
        logits = project(rows, weight)
        raw, ids = logits.log_softmax(1).topk(top_k, 1)
        scaled = (logits / temperature).log_softmax(1).gather(1, ids)
        parts.append((ids, scaled, raw))
    ids, scaled, raw = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, scaled, raw
