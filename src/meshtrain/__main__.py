"""The tools: `meshtrain COMMAND` or `python -m meshtrain COMMAND`. Training is `python -m meshtrain.recipes.NAME`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from meshtrain.errors import Refused
from meshtrain.flags import check_flags, nearest


@dataclass(frozen=True)
class ExportSettings:
    """Write the model in a directory to a new one, in another dtype or with other file sizes. Needs no ranks and little memory."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face model directory, such as OUT/export of a run."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory to make; it appears complete or not at all."""
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"] | None,
        tyro.conf.arg(metavar="{fp32,bf16,fp16,fp64}", help_behavior_hint="(default: as in SOURCE)"),
    ] = None
    """Dtype of the floating-point weights."""
    max_shard_size: str = "5GB"
    """Largest size of one file, as 5GB or 512MiB."""


def export(arguments: Sequence[str]) -> int:
    """Write a model directory anew."""
    check_flags(arguments, ("dtype", "max-shard-size"), "meshtrain export", positional=True)
    settings = tyro.cli(
        ExportSettings, prog="meshtrain export", args=list(arguments), description=ExportSettings.__doc__
    )
    from meshtrain.state.rewrite import export as write

    path = write(
        settings.source,
        settings.out,
        dtype=settings.dtype,
        max_shard_size=settings.max_shard_size,
    )
    print(f"wrote {path}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"export": export}

USAGE = """usage: meshtrain COMMAND [OPTIONS]

commands:
{commands}

meshtrain COMMAND --help says more. To train: python -m meshtrain.recipes.llama --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = USAGE.format(commands="\n".join(f"  {name:<8} {command.__doc__}" for name, command in COMMANDS.items()))
    if given and given[0] in ("-h", "--help"):
        print(usage)
        return 0
    try:
        if not given or given[0] not in COMMANDS:
            name = given[0] if given else ""
            raise Refused(
                (f"unknown command {name!r}{nearest(name, COMMANDS)}" if given else "no command was given")
                + f"\n{usage}"
            )
        return COMMANDS[given[0]](given[1:])
    except Refused as error:
        from meshtrain.train.console import refuse

        refuse(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
