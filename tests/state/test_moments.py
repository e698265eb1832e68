"""The state of optimizers as plain data: every kind that fits comes back exactly, everything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from meshtrain.errors import ContractError, Refused
from meshtrain.state.content import named_parameters
from meshtrain.state.moments import OptimizerState, capture, restore
from meshtrain.train.optim import AdamW

Make = Callable[[Any], optim.Optimizer]

KINDS: dict[str, Make] = {
    "Adam with amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "meshtrain's AdamW": AdamW,
    "AdamW": lambda p: optim.AdamW(p, betas=(0.8, 0.9)),
    "fused AdamW": lambda p: optim.AdamW(p, fused=True),
    "AdamW with a tensor as rate": lambda p: optim.AdamW(p, lr=torch.tensor(0.02)),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RAdam": optim.RAdam,
    "NAdam": optim.NAdam,
    "Adamax": optim.Adamax,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": optim.Rprop,
    "ASGD": lambda p: optim.ASGD(p, t0=1),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in net.parameters() if p.dim() == 1], "lr": 0.003}]


def steps(net: nn.Module, optimizer: optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        (net(x) - x.sum(1, keepdim=True)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def moved(found: OptimizerState, net: nn.Module, optimizer: optim.Optimizer) -> None:
    """Give what was captured to another optimizer, as a checkpoint does: the record as JSON, the moments by value."""
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    moments = {kind: {name: t.clone() for name, t in held.items()} for kind, held in found.moments.items()}
    dtypes = {name: parameter.dtype for name, parameter in net.named_parameters()}
    local = restore(optimizer, named_parameters(net), record, dtypes)
    assert {kind: set(held) for kind, held in local.items()} == {kind: set(held) for kind, held in moments.items()}
    for kind, held in local.items():
        for name, tensor in held.items():
            assert tensor.dtype == moments[kind][name].dtype
            tensor.copy_(moments[kind][name])


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without what is None, which means the same as absent."""
    return {
        kind: value.tolist() if isinstance(value, Tensor) else value
        for kind, value in state.items()
        if value is not None
    }


@pytest.mark.parametrize("made", KINDS)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_every_elementwise_optimizer_goes_on_as_it_would_have(made: str, before: int) -> None:
    net, again = model(), model()
    optimizer = KINDS[made](groups(net))
    steps(net, optimizer, 0, before)
    found = capture(optimizer, named_parameters(net))
    other = KINDS[made](groups(again))
    steps(again, other, 50, 53)  # what it knew is forgotten
    other.param_groups[0]["lr"] *= 7
    moved(found, again, other)
    again.load_state_dict(net.state_dict())
    for ours, theirs in zip(net.parameters(), again.parameters()):
        assert comparable(optimizer.state.get(ours, {})) == comparable(other.state.get(theirs, {}))
    for ours, theirs in zip(optimizer.param_groups, other.param_groups):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        assert [type(v) for v in ours.values()] == [type(v) for v in theirs.values()], (
            "tuples and tensors stay what they are"
        )
    steps(net, optimizer, before, before + 3)
    steps(again, other, before, before + 3)
    for ours, theirs in zip(net.parameters(), again.parameters()):
        assert torch.equal(ours, theirs)


def test_looking_at_an_optimizer_makes_no_state() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    found = capture(optimizer, named_parameters(net))
    assert found.moments == found.numbers == {}
    assert not optimizer.state


def test_numbers_that_differ_between_parameters_are_kept_apart() -> None:
    """A layer that joins later has made fewer steps."""
    net = model()
    optimizer = optim.AdamW(net.parameters())
    net[0].requires_grad_(False)
    steps(net, optimizer, 0, 2)
    net[0].requires_grad_(True)
    steps(net, optimizer, 2, 3)
    found = capture(optimizer, named_parameters(net))
    assert found.record()["numbers"]["step"]["each"]["0.weight"] == 1
    assert found.record()["numbers"]["step"]["each"]["2.weight"] == 3
    again = model()
    other = optim.AdamW(again.parameters())
    moved(found, again, other)
    assert [int(other.state[p]["step"]) for p in again.parameters()] == [1, 1, 3, 3, 3, 3]


def test_steps_of_fused_and_capturable_optimizers_are_on_the_device_of_their_parameter() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    steps(net, optimizer, 0, 1)
    record = capture(optimizer, named_parameters(net)).record()
    with torch.device("meta"):
        elsewhere = model()
    for option, device in (("", "cpu"), ("capturable", "meta"), ("fused", "meta")):
        other = optim.AdamW(elsewhere.parameters())
        for group in record["groups"]:
            group.update({"fused": False, "capturable": False, **({option: True} if option else {})})
        restore(other, named_parameters(elsewhere), record, {})
        assert {state["step"].device.type for state in other.state.values()} == {device}
    own = AdamW(net.parameters())
    steps(net, own, 0, 1)
    other = AdamW(elsewhere.parameters())
    restore(other, named_parameters(elsewhere), capture(own, named_parameters(net)).record(), {})
    assert {state["step"].device.type for state in other.state.values()} == {"meta"}


def test_moments_follow_their_parameter_into_another_dtype_and_others_keep_theirs() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    steps(net, optimizer, 0, 1)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    record = capture(optimizer, named_parameters(net)).record()
    before = {name: parameter.dtype for name, parameter in net.named_parameters()}
    double = model().double()
    other = optim.AdamW(double.parameters())
    moments = restore(other, named_parameters(double), record, before)
    assert {tensor.dtype for tensor in moments["exp_avg"].values()} == {torch.float64}
    assert {tensor.dtype for tensor in moments["exp_avg_sq"].values()} == {torch.bfloat16}
    assert {state["step"].dtype for state in other.state.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: optim.Adafactor(p), "eps"),
        (lambda p: optim.LBFGS(p), "LBFGS"),
    ],
    ids=["Adafactor", "LBFGS"],
)
def test_optimizers_that_keep_something_else_are_refused(make: Make, words: str) -> None:
    net = model()
    optimizer = make(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ContractError, match=words):
        capture(optimizer, named_parameters(net))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, 2), r"as a tensor of shape \[2, 2\]"),
        ([1, 2], "as a list"),
        (float("nan"), "finite"),
        (torch.tensor(float("inf")), "finite"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused_by_name(value: Any, words: str) -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    steps(net, optimizer, 0, 1)
    optimizer.state[net[0].weight]["extra"] = value
    with pytest.raises(ContractError, match=rf"extra.*0\.weight.*{words}"):
        capture(optimizer, named_parameters(net))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), (1, "a")])
def test_options_that_are_no_finite_numbers_are_refused_by_name(value: Any) -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["mine"] = value
    with pytest.raises(ContractError, match="'mine'"):
        capture(optimizer, named_parameters(net))


def test_parameters_of_another_model_are_refused() -> None:
    net, other = model(), model()
    with pytest.raises(ContractError, match="that the model does not have"):
        capture(optim.SGD(other.parameters(), lr=0.1), named_parameters(net))
    record = capture(optim.SGD(net.parameters(), lr=0.1), named_parameters(net)).record()
    with pytest.raises(ContractError, match="that the model does not have"):
        restore(optim.SGD(other.parameters(), lr=0.1), named_parameters(net), record, {})


def test_the_state_of_another_kind_is_refused() -> None:
    net = model()
    record = capture(optim.SGD(net.parameters(), lr=0.1), named_parameters(net)).record()
    with pytest.raises(Refused, match="the state of 'SGD', this optimizer is AdamW"):
        restore(optim.AdamW(net.parameters()), named_parameters(net), record, {})


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda net: groups(net)[:1], "'0.bias' is not in the optimizer"),
        (lambda net: [{"params": list(net.parameters())}], "grouped otherwise"),
        (
            lambda net: [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}],
            "is not in the optimizer",
        ),
    ],
    ids=["fewer", "one", "others"],
)
def test_other_groups_are_refused_and_nothing_is_changed(choose: Callable[[nn.Module], Any], words: str) -> None:
    net = model()
    optimizer = optim.AdamW(groups(net))
    steps(net, optimizer, 0, 1)
    record = capture(optimizer, named_parameters(net)).record()
    other = optim.AdamW(choose(net), lr=0.5)
    steps(net, other, 0, 1)
    with pytest.raises(Refused, match=words):
        restore(other, named_parameters(net), record, {})
    assert other.state
    assert other.param_groups[0]["lr"] == 0.5
    more = optim.AdamW(groups(net))
    record = capture(optim.AdamW(choose(net)), named_parameters(net)).record()
    with pytest.raises(Refused, match="is new in the optimizer|grouped otherwise"):
        restore(more, named_parameters(net), record, {})
