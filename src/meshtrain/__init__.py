"""meshtrain: tensor parallelism and FSDP2 on one dp x tp mesh.

mesh = init_mesh(dp=4, tp=2)
with torch.device("meta"):
    model = MyModel()
parallelize(model, mesh, plan)
initialise(model, seed=0)                     # or load_pretrained(model, "some/directory")
optimizer = adamw(model, lr=3e-4)
for batch in batches:
    result = train_step(model, optimizer, [batch], max_norm=1.0)
save_pretrained(model, "out")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import ContractError, Damaged, MeshtrainError, Refused

if TYPE_CHECKING:
    from .mesh import init_mesh
    from .parallel import (
        ParallelPlan,
        allocate,
        cross_entropy,
        initialise,
        linear_cross_entropy,
        load_plan,
        parallelize,
        resolve,
        state_of,
    )
    from .state.checkpoint import Checkpoint, inspect_checkpoint, save_checkpoint
    from .state.pretrained import load_pretrained, save_pretrained
    from .state.restore import load_checkpoint
    from .state.saver import SaveFailed, Saver
    from .train.clip import NonFinite, clip_grad_norm_
    from .train.optim import AdamW, adamw
    from .train.schedule import learning_rate
    from .train.step import StepResult, train_step

__version__ = "0.1.0"
__all__ = [
    "AdamW", "Checkpoint", "ContractError", "Damaged", "MeshtrainError", "NonFinite", "ParallelPlan", "Refused", "SaveFailed",
    "Saver", "StepResult", "adamw", "allocate", "clip_grad_norm_", "cross_entropy", "init_mesh", "initialise",
    "inspect_checkpoint", "learning_rate", "linear_cross_entropy", "load_checkpoint", "load_plan", "load_pretrained",
    "parallelize", "resolve", "save_checkpoint", "save_pretrained", "state_of", "train_step",
]  # fmt: skip

# Imported at the first use: a command line that is refused, or asked for its --help, does not wait for torch.
_HOME = {
    "init_mesh": ".mesh",
    "ParallelPlan": ".parallel",
    "allocate": ".parallel",
    "cross_entropy": ".parallel",
    "initialise": ".parallel",
    "linear_cross_entropy": ".parallel",
    "load_plan": ".parallel",
    "parallelize": ".parallel",
    "resolve": ".parallel",
    "state_of": ".parallel",
    "Checkpoint": ".state.checkpoint",
    "inspect_checkpoint": ".state.checkpoint",
    "save_checkpoint": ".state.checkpoint",
    "load_checkpoint": ".state.restore",
    "SaveFailed": ".state.saver",
    "Saver": ".state.saver",
    "load_pretrained": ".state.pretrained",
    "save_pretrained": ".state.pretrained",
    "NonFinite": ".train.clip",
    "clip_grad_norm_": ".train.clip",
    "AdamW": ".train.optim",
    "adamw": ".train.optim",
    "learning_rate": ".train.schedule",
    "StepResult": ".train.step",
    "train_step": ".train.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
