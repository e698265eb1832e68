"""Initial weights as a function of seed, parameter name and global position: the same bits on every mesh.

Each element's random number comes from a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", 2011): a hash of a key, made of the seed and the name, and of the element's row-major position in the global
tensor. So a rank makes exactly the elements that it keeps. The hash is SplitMix64's finaliser (Steele et al., 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import Refused
from .layout import ParamLayout


@dataclass(frozen=True)
class Normal:
    """Draws from a normal distribution."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Draws from [low, high)."""

    low: float
    high: float


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


Init = Normal | Uniform | Constant
_CHUNK = 2**16
_ALIGN = 64


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    return value - 2**64 if value >= 2**63 else value


_STEP, _MIX1, _MIX2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def stream_key(seed: int, name: str) -> int:
    """The key of the stream of random numbers that (seed, name) names."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def hash_bits(key: int, position: Tensor) -> Tensor:
    """64 random bits for each int64 position. `position` is overwritten."""
    x = position.mul_(_STEP).add_(key)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def uniform(key: int, position: Tensor) -> Tensor:
    """Numbers in (0, 1), fp64, one for each int64 position. `position` is overwritten."""
    bits = hash_bits(key, position)
    return (bits >> 12).bitwise_and_(2**52 - 1).double().add_(0.5).mul_(2.0**-52)


def draw(init: Init, key: int, position: Tensor) -> Tensor:
    """Values of `init`, fp64, at int64 positions [n]. Bits depend on the position alone, not on its neighbours."""
    if isinstance(init, Constant):
        return torch.full(position.shape, init.value, dtype=torch.float64)
    # Vectorised and scalar code may round differently: whole vectors keep every element on the vectorised path.
    padding = -len(position) % _ALIGN
    u = uniform(key, torch.nn.functional.pad(position, (0, padding)))
    if isinstance(init, Uniform):
        values = u.mul_(init.high - init.low).add_(init.low)
    else:
        values = u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2) * init.std).add_(init.mean)
    return values[: len(position)]


def fill(shard: Tensor, layout: ParamLayout, dp: int, tp: int, init: Init, seed: int) -> None:
    """Give the shard of a coordinate its initial values, in place."""
    key = stream_key(seed, layout.name)
    strides = [1]
    for size in reversed(layout.shape[1:]):
        strides.insert(0, strides[0] * size)
    for block in layout.blocks(dp, tp):
        part = shard[block.of_local()]
        rows_per_chunk = max(1, _CHUNK // max(1, part[0].numel()))
        for first in range(0, len(part), rows_per_chunk):
            rows = part[first : first + rows_per_chunk]
            (start, _), *rest = block.where
            position = torch.arange(start + first, start + first + len(rows)) * strides[0]
            for stride, (low, high) in zip(strides[1:], rest, strict=True):
                position = position.unsqueeze(-1) + torch.arange(low, high) * stride
            rows.copy_(draw(init, key, position.flatten()).view(rows.shape))


def default_init(module: nn.Module, parameter: str, name: str) -> Init:
    """What torch's own module would draw for a parameter of its own, which the model calls `name`. Raises Refused for
    modules it does not know."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return Uniform(-(bound := 1 / math.sqrt(module.in_features)), bound)
    if isinstance(module, nn.Embedding):
        return Normal(1.0)
    if "Norm" in type(module).__name__ and isinstance(weight, Tensor):
        return Constant(1.0 if parameter == "weight" else 0.0)
    raise Refused(
        f"there is no rule for the initial value of '{name}' (a {type(module).__name__}). Give the model a method "
        "initial_value(name) that returns Normal, Uniform or Constant (or None for the default), or load weights"
    )


def rules(model: nn.Module) -> Callable[[str], Init]:
    """Parameter name -> its initial distribution: the model's `initial_value(name)` first, then torch's defaults."""
    own: Callable[[str], Init | None] | None = getattr(model, "initial_value", None)

    def rule(name: str) -> Init:
        given = own(name) if own is not None else None
        if given is not None:
            return given
        path, _, leaf = name.rpartition(".")
        return default_init(model.get_submodule(path), leaf, name)

    return rule
