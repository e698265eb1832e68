"""A pattern that matches nothing is answered with what may have been meant, or with what there is: never with noise."""

from __future__ import annotations

import pytest
from torch import nn

from meshtrain.errors import Refused
from meshtrain.parallel import ParallelPlan, column, embedding, packed_column, replicate, resolve, row
from meshtrain.parallel.patterns import matches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvo"})
        self.norm1, self.norm2, self.gate_up = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 16)


class GPT(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.transformer = (
            nn.Embedding(12, 8),
            nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(depth))}),
        )


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("transformer.h.2.attn.o", "; 'transformer.h' holds '0', '1'. Correct the pattern, or drop it"),
        ("transformer.h.*.attn.oo", "; did you mean 'transformer.h.*.attn.o'?"),
        ("transformer.h.*.mlp", "; 'transformer.h.*' holds 'attn', 'norm1', 'norm2', 'gate_up'. Correct the pattern"),
        ("transformer.h.*.norm3", "; did you mean 'transformer.h.*.norm2' or 'transformer.h.*.norm1'?"),
        ("transfromer.h.*.atn.q", "; did you mean 'transformer.h.*.attn.q'?"),
        ("h.*.attn.q", "; did you mean 'transformer.h.*.attn.q'?"),
        ("h.1", "; did you mean 'transformer.h.1'?"),
        ("model.transformer.h.*.attn.q", "; did you mean 'transformer.h.*.attn.q'?"),
        ("transformer.h.*.attn.q.lora", "; did you mean 'transformer.h.*.attn.q'?"),
        ("WTE", "; did you mean 'wte'?"),
        ("lm_head", "; the GPT holds 'wte', 'transformer'. Correct the pattern, or drop it"),
        (
            "transformer.h.*.attn.q.weight",
            "; it names a parameter, and a plan names modules: write 'transformer.h.*.attn.q'",
        ),
    ],
)
def test_a_miss_is_explained(pattern: str, told: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(ParallelPlan({pattern: column()}), GPT(), (2, 2))
    assert f"the entry '{pattern}' matches no module of the GPT{told}" in str(caught.value)


def test_a_long_list_is_shown_by_its_ends() -> None:
    with pytest.raises(Refused, match=r"'transformer.h' holds '0' to '11'\. Correct"):
        resolve(ParallelPlan({"transformer.h.12": column()}), GPT(12), (2, 2))


def test_segments_are_matched_one_by_one() -> None:
    assert matches("h.*.norm*", "h.3.norm1") and not matches("h.*", "h.3.norm1") and not matches("h.*.q", "h.q")


def test_cuts_are_told_in_words() -> None:
    """Not by torch's `_S(0, 2)`, which says nothing to who has not read its source."""
    plan = ParallelPlan(
        {
            "wte": embedding(),
            "transformer.h.*.attn.[qkv]": column(),
            "transformer.h.*.attn.o": row(),
            "transformer.h.*.norm*": replicate(),
            "transformer.h.*.gate_up": packed_column(),
        }
    )
    resolved = resolve(plan, GPT(), (2, 2))
    words = {
        name: resolved[name].cut
        for name in ("wte.weight", *(f"transformer.h.0.{n}.weight" for n in ("attn.o", "norm1", "gate_up")))
    }
    assert list(words.values()) == [
        "rows over tp, then dp", "columns over tp, rows over dp", "rows over dp", "rows of each of 2 parts over tp, then dp",
    ]  # fmt: skip
    table = str(resolved)
    assert "_S(" not in table and all(f" {cut} " in table for cut in words.values())
    assert {layout.cut for layout in resolve(plan, GPT(), (4, 1)).layouts} == {"rows over dp"}
