"""Rotary position embedding with Llama 3 and linear scaling: tables made on demand, and the rotation. Not
attention.

Nothing here is a buffer: a non-persistent buffer is left uninitialised when a model built on the meta device
is materialised, and is cast when the model is. The tables depend on the config alone, so they are computed
when needed.
"""

import math

import torch
from torch import Tensor

from meshtrain.models.llama_config import LlamaConfig

_MAX_CACHED = 8


class RotaryTables:
    """cos and sin of the rotation angles, each [seq, head_dim]; sin is negated in the first half of head_dim.

    Neither a tuple nor a dataclass, on purpose: FSDP's mixed precision looks into both for floating-point
    tensors among a unit's inputs, and would leave bfloat16 tables.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


class RotaryEmbedding:
    """Makes the tables of a model, once for every (length, device, dtype) in use."""

    def __init__(self, config: LlamaConfig) -> None:
        self.head_dim = config.head_dim
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self._cache: dict[tuple[int, torch.device, torch.dtype], RotaryTables] = {}

    def tables(self, input_ids: Tensor, hidden: Tensor) -> RotaryTables:
        """The tables for input_ids [batch, seq], in float32 (float64 for a float64 `hidden`), on the device
        of `hidden`.
        """
        length, device = input_ids.shape[1], hidden.device
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Under tracing and fake tensors the result belongs to that trace alone.
        if torch.compiler.is_compiling() or type(input_ids) is not Tensor:
            return self._compute(length, device, dtype)
        key = (length, device, dtype)
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            # A table made during inference could not be used in a later training step.
            with torch.inference_mode(False), torch.no_grad():
                self._cache[key] = self._compute(length, device, dtype)
        return self._cache[key]

    def _compute(self, length: int, device: torch.device, dtype: torch.dtype) -> RotaryTables:
        angles = torch.outer(torch.arange(length, device=device, dtype=dtype), self.frequencies(device, dtype))
        cos, sin = angles.cos(), angles.sin()
        return RotaryTables(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Radians per token of each rotated pair, [head_dim / 2] (Su et al., 2021; Llama 3.1 scaling)."""
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=dtype) / self.head_dim
        frequency = 1.0 / (self.theta**exponents)
        scaling = self.scaling
        if scaling is None:
            return frequency
        if scaling.rope_type == "linear":
            return frequency / scaling.factor
        low, high, original = (
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_position_embeddings,
        )
        assert low is not None and high is not None and original is not None  # RopeScaling checked it
        wavelength = 2 * math.pi / frequency
        # 1 where a wavelength fits into the original context `high` times, 0 where fewer than `low` times.
        keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * frequency / scaling.factor + keep * frequency


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotates x [batch, heads, seq, head_dim] by its positions; computed in the tables' dtype, returned in
    that of x.

    The pairs are (i, i + head_dim / 2), as in Hugging Face's weights. Swapping halves with `roll` and a
    signed sine takes three operations, where rotate-half takes six.
    """
    wide = x.to(tables.cos.dtype)
    return torch.addcmul(wide * tables.cos, wide.roll(x.shape[-1] // 2, -1), tables.sin).to(x.dtype)
