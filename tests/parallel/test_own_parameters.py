"""Parameters that the model or a block owns itself, beside modules with entries of their own: covered by an entry on that
module with recurse=False, right on every mesh, and what is advised is what works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.errors import Refused
from meshtrain.parallel import (
    Constant,
    ParallelPlan,
    column,
    cross_entropy,
    embedding,
    head,
    initialise,
    replicate,
    resolve,
    row,
    sequence,
)
from tests.cases.models import assert_same, of_plain, on_meta, plain, sharded, share, tokens, value_of, whole


class Block(nn.Module):
    """Each branch of the residual has a scale of its own, as with LayerScale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Scaled(nn.Module):
    """The root owns a scale and a shift of the embeddings, and uses them between its modules."""

    def __init__(self, vocab: int = 12, width: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(1, width))
        self.embed, self.blocks = nn.Embedding(vocab, width), nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def initial_value(self, name: str) -> Constant | None:
        return Constant(0.5) if name.rpartition(".")[2] in ("scale", "shift") else None


STYLES: dict[str, Any] = {
    "embed": embedding(),
    "blocks.*.norm": sequence(),
    "blocks.*.up": column(),
    "blocks.*.down": row(),
    "head": head(),
}
OWN = {"": sequence(recurse=False), "blocks.*": sequence(recurse=False)}


def three_steps(dp: int, tp: int, styles: dict[str, Any], options: dict[str, Any]) -> None:
    plan = ParallelPlan(styles, ("blocks.*",))
    reference, model = plain(Scaled), sharded(Scaled, plan, dp, tp, **options)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model))
    for step in range(3):
        ids, labels = tokens(8, 6, step, 12)
        F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        (cross_entropy(model(share(ids, dp, tp)), share(labels, dp, tp)) * dp).backward()
        assert_same(whole(model), of_plain(reference), 1e-10)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole(model, value_of), of_plain(reference, value_of), 1e-9)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"activation_checkpointing": True}])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_they_train_as_in_one_process(ranks, dp, tp, options):
    ranks(4).run(three_steps, dp, tp, {**STYLES, **OWN}, options)


def test_whole_gradients_where_there_is_no_sequence_parallelism(ranks):
    own = {"": replicate(recurse=False), "blocks.*": replicate(recurse=False)}
    ranks(4).run(three_steps, 2, 2, {**STYLES, **own}, {"sequence_parallel": False})


def wrong_style() -> float:
    """The gradient of the root's scale, where only this rank's positions were counted."""
    own = {"": replicate(recurse=False), "blocks.*": sequence(recurse=False)}
    model = sharded(Scaled, ParallelPlan({**STYLES, **own}), 1, 2)
    ids, labels = tokens(4, 6, 0, 12)
    cross_entropy(model(ids), labels).backward()
    reference = plain(Scaled)
    F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return float((model.scale.grad.full_tensor() - reference.scale.grad).abs().max())


def test_the_two_styles_differ_with_sequence_parallelism(ranks):
    """A check of the test above: with the other style the gradient is that of a part of the sequence."""
    assert min(ranks(2).run(wrong_style)) > 1e-3


def test_the_advice_is_an_entry_that_works() -> None:
    with pytest.raises(Refused) as caught:
        resolve(ParallelPlan(STYLES), on_meta(Scaled), (2, 2))
    message = str(caught.value)
    assert "covers no parameters 'scale', 'shift', 'blocks.0.scale', 'blocks.1.scale'" in message
    advice = "sequence(recurse=False) if it is used between the blocks, else replicate(recurse=False)"
    assert f"'': {advice}; 'blocks.*': {advice}" in message
    layouts = resolve(ParallelPlan({**STYLES, **OWN}), on_meta(Scaled), (2, 2))
    assert {name: layouts[name].entry for name in ("scale", "shift", "blocks.1.scale", "blocks.1.up.weight")} == {
        "scale": "", "shift": "", "blocks.1.scale": "blocks.*", "blocks.1.up.weight": "blocks.*.up",
    }  # fmt: skip
    assert layouts["scale"].tp_gradient == "partial"


def test_without_a_stream_the_advice_is_shorter() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("gain", nn.Parameter(torch.ones(4)))
    with pytest.raises(Refused, match=r"Add, for instance, '': replicate\(recurse=False\)$"):
        resolve(ParallelPlan({"0": replicate()}), model, (2, 2))
    with pytest.raises(Refused, match=r"the entry 'gain' .*names a parameter.*write '': replicate\(recurse=False\)"):
        resolve(ParallelPlan({"0": replicate(), "gain": replicate()}), model, (2, 2))


def test_such_an_entry_covers_nothing_below_its_module() -> None:
    with pytest.raises(Refused, match=r"covers no parameters 'head.weight', 'head.bias'"):
        resolve(ParallelPlan({**{k: v for k, v in STYLES.items() if k != "head"}, **OWN}), on_meta(Scaled), (2, 2))
    with pytest.raises(Refused, match=r"'blocks.0.up' has no parameter of its own|covered twice"):
        resolve(ParallelPlan({**STYLES, **OWN, "blocks.*": replicate()}), on_meta(Scaled), (2, 2))


def test_an_entry_for_no_parameter_is_refused() -> None:
    with pytest.raises(
        Refused, match="'Sequential' has no parameter of its own, which is all that an entry with recurse=False"
    ):
        resolve(ParallelPlan({"": replicate(recurse=False), "0": replicate()}), nn.Sequential(nn.Linear(4, 4)), (2, 2))


def test_units_and_dropout_below_such_a_module_are_its_neighbours() -> None:
    """Unlike below sequence(), which covers them: a unit there is allowed, and dropout there is not covered."""
    plan = ParallelPlan({**STYLES, **OWN}, ("blocks.*", "blocks.*.up"))
    assert resolve(plan, on_meta(Scaled), (2, 2)).units == ("blocks.0.up", "blocks.1.up", "blocks.0", "blocks.1")
    model = on_meta(Scaled)
    model.blocks[0].drop = nn.Dropout(0.1)
    with pytest.raises(Refused, match=r"does not cover 'blocks.0.drop'"):
        resolve(plan, model, (2, 2))


def test_initial_values_are_asked_for_by_the_full_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("gain", nn.Parameter(torch.ones(4)))
    with pytest.raises(Refused, match="no rule for the initial value of 'gain'"):
        initialise(model)
