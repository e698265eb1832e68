"""Dropout whose mask is a function of seed, module, call and mesh coordinate, never of a rank's random generator.

Tensor-parallel peers that hold the same activations must drop the same elements; peers that hold different ones (another
sequence shard, other heads) and different dp coordinates must not share a mask. One seed everywhere breaks the second,
a seed per rank the first. `F.dropout` and attention's `dropout_p` cannot be seen from outside, and are not handled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .context import TensorParallel
from .init import stream_key, uniform

MODULES = (nn.Dropout,)
OTHERS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Dropout modules whose masks are not keyed."""


def keyed_dropout(x: Tensor, p: float, key: int) -> Tensor:
    """`x` with each element zeroed with probability `p` and scaled by 1 / (1 - p) otherwise; the mask is keyed."""
    if p <= 0:
        return x
    if p >= 1:
        return x * 0
    position = torch.arange(x.numel(), device=x.device)
    keep = uniform(key, position) >= p
    return x * keep.view(x.shape).to(x.dtype).mul_(1 / (1 - p))


def install(module: nn.Dropout, path: str, tp: TensorParallel, differs_over_tp: Callable[[], bool]) -> None:
    """Replace the forward of a dropout module."""

    # A mask is new in every call, and its key is made with a hash: nothing that a compiler could trace once and keep.
    @torch.compiler.disable
    def drop(x: Tensor) -> Tensor:
        call = tp.next_call()
        shard = tp.axis.index if differs_over_tp() else 0
        return keyed_dropout(x, module.p, stream_key(tp.seed, f"{path}/{call}/{tp.dp_index}/{shard}"))

    def forward(input: Tensor) -> Tensor:  # named as in torch
        return drop(input) if module.training and module.p > 0 else input

    module.forward = forward  # type: ignore[method-assign]
