"""Cross-entropy over a vocabulary that tp cuts, in chunks of tokens, so that full logits are never held.

Every function returns the SUM of the losses of the labels that are not ignored; what to divide it by is known only to
whoever sees the whole global batch (`meshtrain.train.loss`). Softmax and sums are in fp32, in fp64 for fp64 models.

The gradient is computed in the forward pass, chunk by chunk, while a chunk's logits exist (the idea of Liger Kernel's
fused linear cross-entropy, Hsu et al. 2024). Over tp, each chunk takes one all-gather of the pair (log of the local
sum of exponentials, local logit of the label): it replaces the three all-reduces of Megatron-LM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..errors import ContractError
from .collectives import Axis, all_gather_raw, gather_last_raw

IGNORED = -100
"""The label of a token without a loss."""
CHUNK_ELEMENTS = 2**22
"""Logits that a rank holds at once: 16 MiB in fp32."""


class VocabShard(NamedTuple):
    """Which rows of the vocabulary a tp rank has."""

    start: int
    vocab: int
    """Size of the whole vocabulary."""
    step: int
    """Rows of the largest shard."""
    axis: Axis
    loss_parallel: bool
    """True: the tp ranks combine their sums. False: each gathers the logits of a chunk and computes everything."""


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _loss_and_gradient(logits: Tensor, labels: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Losses [tokens] and gradients [tokens, local vocab] of the losses with respect to the logits.

    logits [tokens, local vocab]; labels [tokens], ignored ones included.
    """
    valid = labels != IGNORED
    if shard is not None and shard.axis.size > 1 and not shard.loss_parallel:
        width = logits.shape[-1]
        whole = gather_last_raw(logits, shard.vocab, shard.step, shard.axis)
        losses, gradient = _loss_and_gradient(whole, labels, None)
        return losses, gradient.narrow(-1, shard.start, width).contiguous()
    start = shard.start if shard is not None else 0
    own = labels - start
    here = valid & (own >= 0) & (own < logits.shape[-1])
    index = own.masked_fill(~here, 0).unsqueeze(-1)
    target = logits.gather(-1, index).squeeze(-1).masked_fill(~here, 0)
    # The probability of the likeliest entry gives the log of the sum without a second pass of exponentials.
    largest = logits.amax(-1)
    probabilities = torch.softmax(logits, -1)
    total = own_total = largest - probabilities.amax(-1).log_()
    if bool((largest == -torch.inf).any()):
        # A rank whose part of the vocabulary is masked out altogether adds nothing to the sum.
        dead = largest == -torch.inf
        own_total = total = total.masked_fill(dead, -torch.inf)
        probabilities = probabilities.masked_fill(dead.unsqueeze(-1), 0)
    if shard is not None and shard.axis.size > 1:
        both = all_gather_raw(torch.stack((total, target)), shard.axis)
        total, target = torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(dim=0)
    losses = (total - target).masked_fill(~valid, 0)
    weight = (own_total - total).exp_().masked_fill_(~valid, 0)
    gradient = probabilities.mul_(weight.unsqueeze(-1))
    gradient.scatter_add_(-1, index, -here.to(logits.dtype).unsqueeze(-1))
    return losses, gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shard: VocabShard | None,
        chunk: int,
    ) -> Tensor:
        precise = _precise(hidden)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=precise) if bias is not None and needs[2] else None
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            h = hidden[start : start + chunk]
            logits = torch.nn.functional.linear(h, weight, bias).to(precise)
            losses, gradient = _loss_and_gradient(logits, labels[start : start + chunk], shard)
            loss += losses.sum()
            low = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                if precise == hidden.dtype:
                    grad_weight.addmm_(low.t(), h)
                else:
                    grad_weight += low.t() @ h
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if g is None else g * grad for g in ctx.saved_tensors]  # grad is 0-d: it does not promote
        return *grads, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Sum of the cross-entropy losses of `hidden @ weight.T (+ bias)` against `labels`.

    hidden [..., hidden_size]; weight [vocab or its tp shard, hidden_size]; labels [...] int64, -100 is ignored.
    With `shard`, each tp rank passes its rows of the weight and gets the same loss; the gradient of `hidden` is then one
    term of a sum over tp. Returns a scalar in fp32 (fp64 for fp64); 0 when every label is ignored.
    """
    if isinstance(weight, DTensor):
        raise ContractError(
            "linear_cross_entropy() was given a weight that is a DTensor: outside of the forward of its module a parameter is "
            "not gathered, or cut. Call the output layer with labels, lm_head(hidden, labels), under the style head()"
        )
    if hidden.shape[:-1] != labels.shape:
        raise ContractError(
            f"labels of shape {list(labels.shape)} do not fit hidden states of shape {list(hidden.shape)}: there must be "
            "one label for each position (already shifted by one), -100 where there is none"
        )
    vocab = weight.shape[0] if shard is None else shard.vocab
    _check_labels(labels, vocab)
    widest = vocab if shard is None or not shard.loss_parallel else shard.step
    chunk = max(1, chunk_elements // widest)
    return _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), shard, chunk
    )


def _check_labels(labels: Tensor, vocab: int) -> None:
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
        return
    low, high = torch.aminmax(labels)
    if high >= vocab or (low < 0 and bool(((labels < 0) & (labels != IGNORED)).any())):
        bad = labels[((labels < 0) & (labels != IGNORED)) | (labels >= vocab)][0]
        raise ContractError(
            f"label {int(bad)} is outside the vocabulary of {vocab}; a token without a loss has {IGNORED}"
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard | None) -> Tensor:
        losses, gradient = _loss_and_gradient(logits.to(_precise(logits)), labels, shard)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy losses of `logits` [..., vocab] against `labels` [...] int64; -100 is ignored.

    The logits may be a DTensor that tp cuts on the vocabulary, as a model with loss parallelism returns them. The
    scalar result is the same on every tp rank; 0 when every label is ignored.
    """
    if logits.shape[:-1] != labels.shape:
        raise ContractError(f"labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}")
    vocab, shard = logits.shape[-1], None
    _check_labels(labels, vocab)
    if isinstance(logits, DTensor):
        mesh, (placement,) = logits.device_mesh, logits.placements
        if placement.is_shard(logits.ndim - 1):
            axis = Axis.of(mesh)
            step = -(-vocab // axis.size)
            shard = VocabShard(min(axis.index * step, vocab), vocab, step, axis, True)
        elif not placement.is_replicate():
            raise ContractError(f"logits must be cut on the vocabulary or whole, not {placement}")
        logits = logits.to_local(grad_placements=[Shard(logits.ndim - 1)] if shard is not None else None)
    return _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), shard)
