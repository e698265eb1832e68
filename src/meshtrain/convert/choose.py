"""Which part of a nested checkpoint is the model: by the names that trainers give the parts. Knows no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from meshtrain.errors import Refused
from meshtrain.state.strict_json import shown

NESTED_PATH = tuple[str, ...]
_MODEL = ("app", "model", "state_dict", "model_state_dict", "module")
_OTHER = frozenset(
    {
        "optimizer", "optim", "optimizers", "optimizer_state_dict", "optimizer_states", "lr_scheduler", "lr_schedulers", "scheduler",
        "dataloader", "train_state", "rng_state", "ema", "loss",
    }
)  # fmt: skip
"""Parts that hold tensors, but not the model's."""


def choose(paths: Sequence[NESTED_PATH], origin: str) -> NESTED_PATH:
    """The path of the part that is the model's state dict, of a checkpoint whose tensors have these paths.

    Raises Refused when several parts could be it, or none.
    """
    prefix: NESTED_PATH = ()
    while True:
        depth = len(prefix)
        below = [path for path in paths if path[:depth] == prefix]
        parts = {path[depth] for path in below if len(path) > depth + 1}
        named = [name for name in _MODEL if name in parts]
        others = sorted(parts - _OTHER)
        if named:
            prefix += (named[0],)
        elif any(len(path) == depth + 1 for path in below):
            return prefix
        elif len(others) == 1:
            prefix += (others[0],)
        else:
            what = f"parts {', '.join(map(shown, others[:5]))} hold tensors" if others else "no part holds tensors"
            raise Refused(
                f"{origin}: {what}, and none is named as a model's state dict is ({', '.join(_MODEL)}). Save the state dict alone"
            )


def left_out(paths: Iterable[NESTED_PATH], prefix: NESTED_PATH) -> dict[str, int]:
    """What stays behind: the name of each part beside the chosen one -> its number of tensors."""
    depth = len(prefix)
    found: Counter[str] = Counter()
    for path in paths:
        if path[:depth] != prefix or len(path) > depth + 1:
            same = next((i for i, (a, b) in enumerate(zip(path, prefix)) if a != b), depth)
            found[".".join(path[: same + 1])] += 1
    return dict(found)
