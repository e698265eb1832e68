"""The sum of partial gradients over tp happens however the model is entered, whatever it returns, and once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from meshtrain import ContractError, ParallelPlan, initialise, parallelize, state_of
from meshtrain.parallel import column, embedding, packed_column, row, sequence
from tests.ranks import mesh


@dataclass
class Answer:
    hidden: Tensor


class Net(nn.Module):
    """A stream with a norm on it, which sees a part of the sequence on each tp rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down, self.last = nn.Linear(8, 7), nn.Linear(7, 8), nn.RMSNorm(8)

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.last(x + self.down(self.up(self.norm(x)).relu()))

    def forward(self, ids: Tensor) -> Answer:
        return Answer(self.body(ids))


STYLES = {
    "embed": embedding(), "norm": sequence(), "up": column(), "down": row(), "last": sequence(gather_output=True),
}  # fmt: skip


def gradients(dp: int, tp: int, entry: str, backwards: int) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = Net()
    parallelize(model, mesh(dp, tp), ParallelPlan(STYLES))  # no units: only the root, which FSDP reduces last of all
    initialise(model, seed=1)
    register_fsdp_forward_method(model, "body")
    rank = mesh(dp, tp)["dp"].get_local_rank()
    for step in range(backwards):
        ids = torch.arange(24).view(4, 6).add(step) % 12
        ids = ids[rank * 4 // dp : (rank + 1) * 4 // dp]
        hidden = model(ids).hidden if entry == "forward" else model.body(ids)
        (hidden.pow(3).sum() * dp).backward()
    return {layout.name: p.grad.full_tensor() for layout, p in state_of(model).parameters()}


@pytest.mark.parametrize("entry", ["forward", "body"])
@pytest.mark.parametrize("backwards", [1, 3])
def test_partial_gradients_are_summed_once(ranks: Any, entry: str, backwards: int) -> None:
    expected = ranks(1).run(gradients, 1, 1, entry, backwards)[0]
    for dp, tp in [(1, 2), (2, 2), (1, 4)]:
        for got in ranks(dp * tp).run(gradients, dp, tp, entry, backwards):
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-11, msg=f"{name} at {dp}x{tp}")


def after_a_failed_backward() -> str:
    with torch.device("meta"):
        model = Net()
    parallelize(model, mesh(1, 2), ParallelPlan(STYLES, units=("norm",)))
    initialise(model)
    hidden = model(torch.zeros(1, 4, dtype=torch.int64)).hidden
    model.embed.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    hidden = model(torch.zeros(1, 4, dtype=torch.int64)).hidden
    with pytest.raises(MemoryError):
        hidden.sum().backward()
    with pytest.raises(ContractError, match="earlier backward pass") as caught:
        model(torch.zeros(1, 4, dtype=torch.int64))
    return str(caught.value)


def test_a_failed_backward_is_not_forgotten(ranks: Any) -> None:
    assert "Build the model anew" in ranks(2).run(after_a_failed_backward)[0]


def test_parts_are_the_first_argument_of_packed_column() -> None:
    assert packed_column(3).parts == 3
