"""What users do to a parallelized model that it cannot do, or must do right: calls by keyword, parameters used elsewhere,
parametrizations, inference mode, a loss that is not returned, second derivatives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import parametrizations, prune, weight_norm

from meshtrain.errors import ContractError, Refused
from meshtrain.parallel import (
    Constant,
    Normal,
    ParallelPlan,
    column,
    cross_entropy,
    embedding,
    head,
    heads,
    linear_cross_entropy,
    packed_column,
    packed_row,
    replicate,
    resolve,
    row,
    sequence,
)
from tests.cases.models import (
    LM,
    LM_PLAN,
    LM_STYLES,
    MLP,
    MLP_PLAN,
    assert_same,
    of_plain,
    plain,
    sharded,
    share,
    tokens,
    vectors,
    whole,
)

MESHES = [(2, 2), (4, 1), (1, 4)]


# Keyword arguments


class ByName(LM):
    """A language model that calls all its modules by the names of their arguments."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(input=ids)
        for layer in self.layers:
            h = layer.norm1(hidden=x) if isinstance(layer.norm1, GainNorm) else layer.norm1(x=x)
            parts = (layer.q(input=h), layer.k(input=h), layer.v(input=h))
            q, k, v = (p.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for p in parts)
            repeat = q.shape[1] // k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
            x = x + layer.drop(input=layer.o(input=mixed.transpose(1, 2).flatten(-2)))
            gate, up = layer.gate_up(input=layer.norm2(input=x)).chunk(2, -1)
            x = x + layer.down(input=F.silu(gate) * up)
        return self.lm_head(input=self.norm(x=x))


class GainNorm(nn.RMSNorm):
    """A norm of one's own, whose argument is called otherwise than torch's, with a second one."""

    def forward(self, hidden: Tensor, gain: float = 1.0) -> Tensor:
        return super().forward(hidden) * gain


def by_name() -> LM:
    model = ByName()
    model.layers[0].norm1 = GainNorm(16)
    model.initial_value = lambda name: Constant(1.0) if "norm" in name else None  # type: ignore[assignment]
    return model


def called_by_name(dp: int, tp: int) -> None:
    plan = ParallelPlan(LM_STYLES)  # no units: the layers themselves are not called
    reference, model = plain(by_name), sharded(by_name, plan, dp, tp)
    ids, labels = tokens()
    F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    (cross_entropy(model(ids=share(ids, dp, tp)), share(labels, dp, tp)) * dp).backward()
    assert_same(whole(model), of_plain(reference), 1e-10)


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_styled_modules_take_their_input_by_name(ranks, dp, tp):
    ranks(4).run(called_by_name, dp, tp)


def wrong_names() -> None:
    model, x = sharded(MLP, MLP_PLAN, 2, 2), vectors(4, 8)
    model.forward = lambda x: model.up(features=x)  # type: ignore[method-assign]
    with pytest.raises(
        ContractError, match=r"'up' was called without its input \(input\).*it got features. Pass the input"
    ):
        model(x)
    model.forward = lambda x: model.up()  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=r"'up' was called without its input \(input\).*it got nothing"):
        model(x)


def test_a_name_that_the_module_does_not_know(ranks):
    ranks(4).run(wrong_names)


class Extra(nn.Linear):
    """A linear layer with an argument more."""

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return F.linear(x, self.weight, self.bias) * scale + shift


class WithExtra(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = Extra(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(self.up(h, 2.0, shift=0.5) + self.up(x=h, scale=3.0))


def extra_arguments(up: Any, down: Any) -> None:
    x, reference = vectors(8, 3, 8), plain(WithExtra)
    model = sharded(WithExtra, ParallelPlan({**MLP_PLAN.styles, "up": up, "down": down}), 2, 2)
    wanted = reference(x)
    assert torch.allclose(model(share(x, 2, 2)), share(wanted, 2, 2), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("up", "down"), [(column(), row()), (heads(4), row()), (packed_column(), packed_row())])
def test_arguments_besides_the_input_arrive(ranks, up, down):
    ranks(4).run(extra_arguments, up, down)


# Parameters outside their module


class ByHand(nn.Module):
    """An output layer made of the embedding's weight, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.RMSNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.embed(ids)), self.embed.weight)


def weight_elsewhere(dp: int, tp: int) -> None:
    model = sharded(ByHand, ParallelPlan({"embed": embedding(), "norm": sequence()}), dp, tp)
    with pytest.raises(
        ContractError, match=r"F.linear\(x, embed.weight\).*an nn.Linear with the style head\(\), and tie"
    ):
        model(tokens(vocab=12)[0])


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_weight_used_outside_its_module(ranks, dp, tp):
    ranks(4).run(weight_elsewhere, dp, tp)


class ByLoss(ByHand):
    """The same in the loss."""

    def forward(self, ids: Tensor) -> Tensor:
        return linear_cross_entropy(self.norm(self.embed(ids)), self.embed.weight, ids)


def loss_of_weight_elsewhere() -> None:
    model = sharded(ByLoss, ParallelPlan({"embed": embedding(), "norm": sequence()}), 2, 2)
    with pytest.raises(
        ContractError, match=r"a weight that is a DTensor.*lm_head\(hidden, labels\), under the style head"
    ):
        model(tokens(vocab=12)[0])


def test_nor_in_the_loss(ranks):
    ranks(4).run(loss_of_weight_elsewhere)


# Parametrizations


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(module)


PARAMETRIZED = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    old_weight_norm,
    lambda module: prune.l1_unstructured(module, "weight", 0.5),
    lambda module: parametrizations.weight_norm(module, "bias", dim=None),
]


@pytest.mark.parametrize("parametrize", PARAMETRIZED)
@pytest.mark.parametrize("style", [column(), row(), heads(2), head(), packed_column()], ids=str)
def test_a_weight_that_is_computed_cannot_be_cut(style, parametrize):
    model = nn.Sequential(parametrize(nn.Linear(8, 8)))
    with pytest.raises(Refused, match=r"'0' has no parameter '(weight|bias)': weight_norm.*Use replicate\(\)"):
        resolve(ParallelPlan({"0": style}), model, (2, 2))


def test_nor_that_of_an_embedding():
    model = nn.Sequential(parametrizations.weight_norm(nn.Embedding(8, 8)))
    for style, name in ((embedding(), "embedding"), (ColwiseParallel(), "ColwiseParallel")):
        with pytest.raises(Refused, match=rf"'0' has no parameter 'weight'.*and {name}\(\) cuts"):
            resolve(ParallelPlan({"0": style}), model, (2, 2))


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.between = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.between(x))

    def initial_value(self, name: str) -> Normal | None:
        return Normal(1.0) if "parametrizations" in name else None


def replicated_weight_norm() -> None:
    reference = plain(Normed)
    model = sharded(Normed, ParallelPlan({**MLP_PLAN.styles, "between": replicate()}), 2, 2)
    x = vectors(8, 8)
    reference(x).square().sum().backward()
    (model(share(x, 2, 2)).square().sum() * 2).backward()
    assert_same(whole(model), of_plain(reference), 1e-10)


def test_under_replicate_it_is_right(ranks):
    ranks(4).run(replicated_weight_norm)


# Inference mode first


def inference_first(dp: int, tp: int, options: dict[str, Any]) -> None:
    reference, model = plain(LM), sharded(LM, LM_PLAN, dp, tp, **options)
    ids, labels = tokens()
    for _ in range(2):
        with torch.inference_mode():
            logits = model(share(ids, dp, tp))
            assert logits.is_inference()
        F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        (cross_entropy(model(share(ids, dp, tp)), share(labels, dp, tp)) * dp).backward()
        assert_same(whole(model), of_plain(reference), 1e-10)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False, "reshard_after_forward": False}])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_model_whose_first_pass_was_in_inference_mode_can_be_trained(ranks, dp, tp, options):
    ranks(4).run(inference_first, dp, tp, options)


# A loss that is not returned


class Keeper(nn.Module):
    """Keeps its loss to itself."""

    def __init__(self, answer: str = "none") -> None:
        super().__init__()
        self.lm, self.answer = LM(), answer

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        self.loss = cross_entropy(self.lm(ids), labels)
        return {"none": None, "number": {"loss": self.loss.item()}, "loss": (self.loss,)}[self.answer]


KEEPER_PLAN = ParallelPlan({f"lm.{name}": style for name, style in LM_STYLES.items()}, ("lm.layers.*",))


def kept_loss(answer: str) -> None:
    model = sharded(lambda: Keeper(answer), KEEPER_PLAN, 2, 2)
    ids, labels = (share(t, 2, 2) for t in tokens())
    with pytest.raises(
        ContractError, match=r"returned nothing that has a gradient.*return the loss.*torch.no_grad\(\)"
    ):
        model(ids, labels)
    with torch.no_grad():
        model(ids, labels)
    model.eval()(ids, labels)
    model.train().answer = "loss"
    model(ids, labels)[0].backward()
    assert all(gradient is not None for gradient in whole(model).values())


@pytest.mark.parametrize("answer", ["none", "number"])
def test_a_loss_in_an_attribute_is_refused_and_the_model_goes_on(ranks, answer):
    ranks(4).run(kept_loss, answer)


def frozen_model() -> None:
    model = sharded(lambda: Keeper("number").requires_grad_(False), KEEPER_PLAN, 2, 2)
    model(*(share(t, 2, 2) for t in tokens()))


def test_but_not_where_nothing_is_trained(ranks):
    ranks(4).run(frozen_model)


# Second derivatives


def second_derivative(dp: int, tp: int, units: tuple[str, ...]) -> None:
    model = sharded(MLP, ParallelPlan(MLP_PLAN.styles, units), dp, tp)
    x = share(vectors(8, 8), dp, tp).requires_grad_()
    out = model(x).square().sum()
    with pytest.raises(ContractError, match=r"create_graph=True \(a gradient penalty"):
        torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(ContractError, match="create_graph=True"):
        out.backward(create_graph=True)
    (out * dp).backward()  # nothing was harmed
    reference = plain(MLP)
    reference(vectors(8, 8)).square().sum().backward()
    assert_same(whole(model), of_plain(reference), 1e-10)


@pytest.mark.parametrize("units", [(), ("up",)])
@pytest.mark.parametrize(("dp", "tp"), [*MESHES, (1, 1)])
def test_a_gradient_penalty_is_refused_before_it_harms_anything(ranks, dp, tp, units):
    ranks(dp * tp).run(second_derivative, dp, tp, units)
