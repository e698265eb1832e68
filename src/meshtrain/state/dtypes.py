"""The dtypes of safetensors files as torch knows them, and the names under which people ask for one."""

from __future__ import annotations

import torch

from meshtrain.errors import Refused
from meshtrain.state.header import BITS

TORCH_OF: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Name in the file -> torch dtype; a name that is absent is one that meshtrain does not read."""

NAME_OF = {dtype: name for name, dtype in TORCH_OF.items()}
assert BITS.keys() >= TORCH_OF.keys()

WEIGHTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Short name -> a dtype that weights are trained or written in."""
_LONG = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHTS.values()}


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype from its name; None stays None (each tensor keeps its own). Raises Refused."""
    if dtype is None or dtype in WEIGHTS.values():
        return dtype  # type: ignore[return-value]
    names = {**_LONG, **WEIGHTS}
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in names:
        return names[dtype.removeprefix("torch.")]
    raise Refused(f"dtype {dtype!r} is not one that weights are written in: use one of {', '.join(names)}")


def dtype_written(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is written: floating ones as `wanted`, others as they are."""
    return wanted if wanted is not None and stored in WEIGHTS.values() else stored
