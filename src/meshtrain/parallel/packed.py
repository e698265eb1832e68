"""Styles of linear modules whose weight is several matrices in one: gate and up, or query, key and value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..errors import Refused
from .arguments import COUNTS, PARTS
from .linear import column_cuts, column_forward, matrix_dims, row_cuts, row_forward, weight_size
from .style import Cut, Forward, Scope, Site, Style, check_nonempty


@dataclass
class Packed(Style):
    """What the styles of fused weights share: the lengths of their parts."""

    rules = {"parts": PARTS.or_none(), "heads": COUNTS}

    parts: int | None = None
    """Number of equal parts; 2 where neither this nor `heads` is given."""
    heads: tuple[int | str, ...] = ()
    """Instead: the numbers of heads of each part, or the attributes of the model's config that hold them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads and self.parts is not None:
            raise Refused(
                f"{self} gives `parts`, for parts of one size, and `heads`, which says the size of each. Drop one in the plan"
            )
        if not self.heads and self.parts is None:
            self.parts = 2

    def lengths(self, size: int, path: str, scope: Scope) -> tuple[int, ...]:
        """Lengths of the parts of a dim of `size`."""
        tp = scope.sizes.tp
        if self.parts is not None:
            if size % self.parts:
                raise Refused(
                    f"'{path}': {self} cannot cut {size} into {self.parts} equal parts. Correct `parts` in the plan"
                )
            check_nonempty(size // self.parts, "the size of a fused part", path, tp)
            return (size // self.parts,) * self.parts
        counts = [scope.count(count, path) for count in self.heads]
        if size % sum(counts):
            raise Refused(
                f"'{path}': its size {size} is not a multiple of its {sum(counts)} heads in all ({self}). Correct the numbers "
                "of heads in the config or in the plan"
            )
        if uneven := [count for count in counts if count % tp]:
            raise Refused(
                f"'{path}': tp {tp} would cut a head of its fused parts with {', '.join(map(str, counts))} heads "
                f"({uneven[0]} is not a multiple of {tp}). Use a tp that divides them all"
            )
        return tuple(size // sum(counts) * count for count in counts)


@dataclass
class PackedColumn(Packed):
    """A column() for a fused weight, such as [gate; up] or [query; key; value]: each part is cut, and a tp rank holds
    its chunk of every part, in order. The module must split its output by local sizes (`chunk`, or heads / tp)."""

    name = "packed_column"

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        out_dim, _ = matrix_dims(module, path, str(self))
        return column_cuts(module, out_dim, self.lengths(weight_size(module, out_dim), path, scope))

    def forward(self, site: Site) -> Forward:
        return column_forward(site)


@dataclass
class PackedRow(Packed):
    """A row() whose input is the output of a packed_column(), unsplit: its input dim has the same fused parts."""

    name = "packed_row"

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        _, in_dim = matrix_dims(module, path, str(self))
        lengths = self.lengths(weight_size(module, in_dim), path, scope)
        return row_cuts(module, path, scope, str(self), in_dim, lengths)

    def forward(self, site: Site) -> Forward:
        return row_forward(site)
