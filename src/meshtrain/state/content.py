"""What a checkpoint takes from a running job, on this rank: tensors, numbers and generators, and the files they become.

Taking it is cheap, local and needs no other rank; planning and writing may happen later, elsewhere, from a copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain import __version__
from meshtrain.errors import ContractError, Refused
from meshtrain.parallel.layout import ParamLayout
from meshtrain.parallel.state import ParallelState, find_state
from meshtrain.state.filemap import parse_size
from meshtrain.state.generators import own_generators
from meshtrain.state.held import Description, Held, describe, held_by, model_part
from meshtrain.state.moments import Named, OptimizerState, capture
from meshtrain.state.names import STATE, STATE_FORMAT, STATE_VERSION, TRAINING
from meshtrain.state.specs import TensorSpec, canonical, layouts_of_plain
from meshtrain.state.strict_json import shown
from meshtrain.state.writer import Part, check_shards, json_bytes, plan_save


@dataclass(frozen=True)
class Content:
    """What this rank brings to a checkpoint."""

    step: int
    model: Description
    held: Held
    optimizer: OptimizerState
    generators: Mapping[str, bytes]
    """The state of this rank's generators, by device."""
    parallel: Mapping[str, Any]
    """The plan and its switches, as JSON."""
    run: Mapping[str, Any]
    """What the caller wants back, as JSON."""
    milestone: bool = False
    """Whether it is to stay when old checkpoints go."""

    def tensors(self) -> list[Tensor]:
        """Every local tensor, in an order that stays the same from one save to the next."""
        kinds = [self.held.shards, *(held for _, held in sorted(self.optimizer.moments.items()))]
        return [tensor for held in kinds for _, tensor in sorted(held.items())]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Content:
        """The same with these tensors instead, in the order of `tensors`."""
        rest = iter(tensors)

        def renewed(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: next(rest) for name in sorted(held)}

        shards = renewed(self.held.shards)
        moments = {kind: renewed(held) for kind, held in sorted(self.optimizer.moments.items())}
        held = replace(self.held, shards=shards, buffers={name: shards[name] for name in self.held.buffers})
        return replace(self, held=held, optimizer=replace(self.optimizer, moments=moments))


def take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    run: Mapping[str, Any] | None = None,
    generation_config: Any = None,
) -> Content:
    """What a checkpoint after `step` steps consists of on this rank. The tensors are the live ones, not copies.

    Raises ContractError for an optimizer of another model, and for what a checkpoint cannot hold.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ContractError(f"step is {step!r}: it must be the number of steps made, 0 or more")
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ContractError(
                f"'{path}' ({type(module).__name__}) has get_extra_state(), which no model file holds. Keep what it returns in "
                "a persistent buffer, or hand it over in run="
            )
    held = held_by(model)
    return Content(
        step,
        describe(held, model, generation_config),
        held,
        capture(optimizer, named_parameters(model)),
        own_generators(),
        _parallel(model),
        _as_json(run or {}),
    )


def named_parameters(model: nn.Module) -> Named:
    """Each parameter of a model, parallelized or plain, once, with its layout."""
    state = find_state(model)
    if state is not None:
        return state.parameters()
    by_name = {canonical(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    return [(layout, by_name[layout.name]) for layout in layouts_of_plain(model)]


def plan_parts(content: Content, max_shard_size: int | str) -> tuple[list[Part], dict[str, bytes]]:
    """The files that the content becomes, and those beside them but the tokenizer's; the same on every rank."""
    parse_size(max_shard_size)
    held = content.held
    model, texts = model_part(held, content.model, None, max_shard_size)
    parts = [model]
    layouts = {layout.name: layout for layout in held.layouts}
    for kind, tensors in sorted(content.optimizer.moments.items()):
        specs = moment_specs(kind, {name: tensors[name].dtype for name in tensors}, layouts)
        check_shards(specs, tensors, held.coordinate)
        parts.append(Part(plan_save(specs, None, max_shard_size, f"{TRAINING}/{kind}"), tensors))
    texts[STATE] = json_bytes(
        {
            "format": STATE_FORMAT,
            "version": STATE_VERSION,
            "step": content.step,
            "milestone": content.milestone,
            "optimizer": content.optimizer.record(),
            "mesh": {"dp": held.sizes.dp, "tp": held.sizes.tp},
            "parallel": content.parallel,
            "versions": {"meshtrain": __version__, "torch": str(torch.__version__)},
            "run": content.run,
        }
    )
    return parts, texts


def moment_specs(kind: str, dtypes: Mapping[str, torch.dtype], layouts: Mapping[str, ParamLayout]) -> list[TensorSpec]:
    """One kind of moment as tensors that are cut as their parameters are, in the order of the parameters."""
    if not kind.isidentifier() or kind == "generators":
        raise Refused(f"{kind!r} is no name that a moment of an optimizer can be stored under; rename it")
    return [
        TensorSpec(name, name, (name,), layout.shape, dtypes[name], replace(layout, dtype=dtypes[name]))
        for name, layout in layouts.items()
        if name in dtypes
    ]


def _as_json(run: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, as it will be read: what the caller changes later is not in it."""
    result: dict[str, Any] = {}
    for name, value in run.items():
        try:
            result.update(json.loads(json.dumps({name: value}, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"run[{name!r}] is {shown(repr(value))}, which is not JSON ({error}): give objects, lists, strings, finite numbers, "
                "true, false and null"
            ) from error
    return result


def _parallel(model: nn.Module) -> dict[str, Any]:
    state: ParallelState | None = find_state(model)
    if state is None:
        return {}
    return {
        "plan": state.resolved.plan.as_json(),
        "sequence_parallel": state.resolved.sequence_parallel,
        "loss_parallel": state.resolved.loss_parallel,
        "dropout_calls": state.tp.calls,
    }
