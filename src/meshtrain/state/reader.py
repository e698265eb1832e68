"""Reading weights into local shards: every rank reads its own byte intervals, and nothing else, from the
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from meshtrain.errors import Refused
from meshtrain.state.header import TensorEntry, open_regular
from meshtrain.state.specs import TensorSpec
from meshtrain.state.sums import Sums
from meshtrain.state.transfer import Staging, read_shard, same_shard

Sources = Mapping[str, Sequence[TensorEntry]]
"""Name of a tensor -> where it is stored; several entries for a tied one that is stored several times."""


def read_own(
    specs: Sequence[TensorSpec],
    sources: Sources,
    shards: Mapping[str, Tensor],
    coordinate: tuple[int, int],
    staging: Staging,
    sums: Sums | None = None,
) -> None:
    """Fill the local tensors of a coordinate in place, file by file in the order of the bytes.

    Raises Refused when a file changes meanwhile; the local tensors are then partly filled.
    """
    by_file: dict[Path, list[tuple[TensorEntry, TensorSpec]]] = {}
    for spec in specs:
        entry = sources[spec.name][0]
        by_file.setdefault(entry.file, []).append((entry, spec))
    for file, wanted in by_file.items():
        with open_regular(file) as (descriptor, _):
            for entry, spec in sorted(wanted, key=lambda item: item[0].offset):
                # What several ranks read counts once, as in the file.
                total = sums.of(entry.file, entry.offset) if sums and spec.writes(*coordinate) else None
                read_shard(descriptor, entry, spec, coordinate, shards[spec.name], staging, total)


def check_copies(specs: Sequence[TensorSpec], sources: Sources, coordinate: tuple[int, int], staging: Staging) -> None:
    """Raise Refused when a tied parameter is stored under several names with different values."""
    for spec in specs:
        first, *others = sources[spec.name]
        for other in others:
            with ExitStack() as stack:
                left = stack.enter_context(open_regular(first.file))[0]
                right = stack.enter_context(open_regular(other.file))[0]
                if not same_shard((left, first), (right, other), spec, coordinate, staging):
                    raise Refused(
                        f"{first.file.parent}: {', '.join(spec.names)} are one tied parameter of the model, "
                        f"but the checkpoint "
                        "holds different values for them. Build the model untied (tie_word_embeddings = "
                        "false), or drop "
                        "the copy that does not count"
                    )


def digest_of(entries: Mapping[str, TensorEntry]) -> bytes:
    """32 bytes that are equal for checkpoints with the same keys, dtypes and shapes."""
    total = hashlib.sha256()
    for key, entry in sorted(entries.items()):
        total.update(repr((key, entry.dtype, entry.shape)).encode())
    return total.digest()
