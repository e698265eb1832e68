"""AdamW on local shards: torch's fused kernel, without DTensor's dispatch.

The parameters and the state stay DTensors over (dp, tp) for whoever looks at the optimizer; only the step works on
what this rank holds. Update rule: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ContractError
from ..parallel.context import local_tensor
from ..parallel.state import state_of


class AdamW(torch.optim.Optimizer):
    """AdamW over sharded parameters. State per parameter: `exp_avg`, `exp_avg_sq` (like it), `step` (0-d fp32)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ContractError(
                f"AdamW(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): lr, eps and weight_decay must not be "
                "negative, and both betas lie in [0, 1)"
            )
        # fused tells whoever restores the state (torch, a checkpoint) that `step` belongs on the parameter's device.
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))

    def _init_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            device = local_tensor(parameter).device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._init_state(p) for p in parameters]
            kept = [(p, s) for p, s in zip(parameters, states) if local_tensor(p).numel()]
            for _, state in zip(parameters, states):
                state["step"] += 1
            if not kept:
                continue
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                [local_tensor(p) for p, _ in kept],
                [local_tensor(p.grad) for p, _ in kept],
                [local_tensor(s["exp_avg"]) for _, s in kept],
                [local_tensor(s["exp_avg_sq"]) for _, s in kept],
                [],
                [s["step"] for _, s in kept],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return loss


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """The optimizer of a parallelized model: weight decay on matrices only (parameters of two dims or more).

    Raises ContractError before the model is parallelized and has values (an optimizer built then would hold parameters
    that never train), and for parameters in half precision, which round small updates away.
    """
    state = state_of(model)
    state.local_shards()  # reshards, and refuses parameters without values
    trainable = [(layout, p) for layout, p in state.parameters() if p.requires_grad]
    for layout, parameter in trainable:
        if parameter.dtype.itemsize < 4:
            raise ContractError(
                f"'{layout.name}' is {parameter.dtype}, and AdamW would round away most updates of such a weight. Keep fp32 master "
                "weights: model.float() before parallelize(..., param_dtype=torch.bfloat16), which computes in bfloat16"
            )
    matrices = [p for layout, p in trainable if len(layout.shape) >= 2]
    others = [p for layout, p in trainable if len(layout.shape) < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
