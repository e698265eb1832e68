"""The smaller mesh on which a run goes on when ranks were lost: fewer along dp, the same work a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from meshtrain.restarts import Restarts
from meshtrain.state.names import CHECKPOINTS, checkpoints_in

if TYPE_CHECKING:
    from meshtrain.recipes.prepare import Run


def restarts_of(run: Run) -> Restarts | None:
    """How often, and how, the launcher may start the ranks of this run anew."""
    chosen = run.settings.checkpoint
    if not chosen.max_restarts:
        return None

    def progress() -> int:
        return next((step for step, _ in checkpoints_in(run.out / CHECKPOINTS)), 0)

    return Restarts(chosen.max_restarts, progress, _shrinking(run) if chosen.elastic else None)


def smaller(run: Run, ranks: int) -> Run | None:
    """The run on as many as possible of `ranks` ranks: tp and the global batch stay, and no rank computes more at once than
    before, but more often. None where not even dp = 1 fits.
    """
    mesh, data = run.settings.mesh, run.settings.data
    at_once = data.micro_batch or data.global_batch // mesh.dp
    for dp in range(min(mesh.dp, ranks // mesh.tp), 0, -1):
        if data.global_batch % dp == 0:
            share = data.global_batch // dp
            micro_batch = max(size for size in range(1, min(at_once, share) + 1) if share % size == 0)
            settings = replace(run.settings, mesh=replace(mesh, dp=dp), data=replace(data, micro_batch=micro_batch))
            return replace(run, settings=settings)
    return None


def _shrinking(run: Run) -> Callable[[int], tuple[int, tuple[Run]] | None]:
    def shrink(ranks: int) -> tuple[int, tuple[Run]] | None:
        found = smaller(run, ranks)
        return None if found is None else (found.settings.mesh.dp * found.settings.mesh.tp, (found,))

    return shrink
