"""The vocabulary that plans are written in: one name per style."""

from __future__ import annotations

from .linear import Column, Heads, Row
from .packed import PackedColumn, PackedRow
from .stream import Replicated, Scatter, Sequence
from .style import Applied, Cut, Scope, Site, Style
from .vocabulary import Embedding, Head

column, row, heads = Column, Row, Heads
packed_column, packed_row = PackedColumn, PackedRow
embedding, head = Embedding, Head
sequence, scatter, replicate = Sequence, Scatter, Replicated

STYLES: dict[str, type[Style]] = {
    style.name: style
    for style in (Column, Row, Heads, PackedColumn, PackedRow, Embedding, Head, Sequence, Scatter, Replicated)
}

__all__ = [
    "STYLES", "Applied", "Cut", "Scope", "Site", "Style", "column", "embedding", "head", "heads", "packed_column", "packed_row",
    "replicate", "row", "scatter", "sequence",
]  # fmt: skip
