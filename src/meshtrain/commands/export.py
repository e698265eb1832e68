"""`meshtrain export SOURCE OUT`: a model directory, or the model of a checkpoint, in another dtype or other file sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from meshtrain.flags import parse

Dtype = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"] | None,
    tyro.conf.arg(metavar="{fp32,bf16,fp16,fp64}", help_behavior_hint="(default: as in SOURCE)"),
]


@dataclass(frozen=True)
class Settings:
    """Write the model in a directory to a new one, in another dtype or with other file sizes. Needs no ranks and little
    memory. Of a checkpoint, the training state stays behind, and what is copied is held against its checksums."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face model directory or checkpoint, such as OUT/export or OUT/checkpoints/step-00000100 of a run."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory to make; it appears complete or not at all."""
    dtype: Dtype = None
    """Dtype of the floating-point weights."""
    max_shard_size: str = "5GB"
    """Largest size of one file, as 5GB or 512MiB."""
    overwrite: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Replace OUT if it is a model directory."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    settings = parse(Settings, arguments, "meshtrain export", ("dtype", "max-shard-size", "overwrite"))
    from meshtrain.state.rewrite import export

    path = export(
        settings.source,
        settings.out,
        dtype=settings.dtype,
        max_shard_size=settings.max_shard_size,
        overwrite=settings.overwrite,
    )
    print(f"wrote {path}")
    return 0
