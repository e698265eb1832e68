"""The checksums of tensors that many ranks write or read in parts: each sums its own bytes, one exchange makes them whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshtrain.state.checksum import Contribution, finished
from meshtrain.state.team import Team

Place = tuple[Path, int, int]
"""File, first byte and number of bytes of a tensor."""


class Sums:
    """What this process contributes to the checksum of each tensor that it writes or reads."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int], Contribution] = {}

    def of(self, file: Path, start: int) -> Contribution:
        """Of the tensor whose data begins at byte `start` of a file."""
        return self._found.setdefault((file, start), Contribution())

    def combined(self, places: Sequence[Place], team: Team) -> list[int]:
        """The checksum of each whole tensor. Collective: every rank names the same places."""
        own = []
        for file, start, nbytes in places:
            # An empty tensor begins where the next one does, and has no part in that one's sum.
            found = self._found.get((file, start)) if nbytes else None
            own.append(found.within(nbytes) if found is not None else 0)
        return [finished(number, nbytes) for number, (_, _, nbytes) in zip(team.xor(own), places)]
