"""How torch's own ParallelStyles cut parameters, for plans that hold some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import Refused
from .linear import matrix_dims
from .style import Cut, Scope, check_plain_parameters

PREPARE = (
    torch_styles.PrepareModuleInput, torch_styles.PrepareModuleOutput, torch_styles.PrepareModuleInputOutput,
)  # fmt: skip


def stock_cuts(style: ParallelStyle, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
    """What torch's own styles do to a module's parameters. DTensor reduces their gradients, so all are whole."""
    if isinstance(
        style,
        torch_styles.PrepareModuleInput | torch_styles.PrepareModuleOutput | torch_styles.PrepareModuleInputOutput,
    ):
        return {}
    if isinstance(style, torch_styles.SequenceParallel):
        return {name: Cut(None) for name, _ in module.named_parameters(recurse=False)}
    if not isinstance(style, torch_styles.ColwiseParallel | torch_styles.RowwiseParallel):
        raise Refused(
            f"'{path}': the style {type(style).__name__} does not tell how it cuts parameters. Use torch's Colwise-, Rowwise- "
            "or SequenceParallel or PrepareModule*, or subclass meshtrain.parallel.Style"
        )
    colwise = isinstance(style, torch_styles.ColwiseParallel)
    if isinstance(module, nn.Embedding):
        check_plain_parameters(module, path, f"{type(style).__name__}()")
        cuts = {"weight": Cut(1 if colwise else 0)}
    else:
        matrix_dims(module, path, f"{type(style).__name__}()")
        cuts = {"weight": Cut(0 if colwise else 1)}
        if module.bias is not None:
            cuts["bias"] = Cut(0) if colwise else Cut(None)
    for name, cut in cuts.items():
        if cut.dim is not None and (size := module.get_parameter(name).shape[cut.dim]) % scope.sizes.tp:
            raise Refused(
                f"'{path}.{name}': torch's {type(style).__name__} cuts dim {cut.dim} of size {size}, which tp {scope.sizes.tp} "
                "does not divide; torch is wrong there. Use meshtrain's own style, which is right for any size"
            )
    return cuts


def check_stock_streams(source: str, entries: Mapping[str, Any], sequence_parallel: bool) -> None:
    """Refuse torch's column and row styles that would take a sequence shard for the whole sequence, or give it back whole.

    entries: module path -> entry. Where a PrepareModule* style stands on a module around one, it says what comes in.
    """
    if not sequence_parallel:
        return
    prepared = [path for path, entry in entries.items() if isinstance(entry.style, PREPARE)]
    for path, entry in entries.items():
        style = entry.style
        if isinstance(style, torch_styles.ColwiseParallel):
            layout, argument = style.input_layouts[0], "input_layouts"
        elif isinstance(style, torch_styles.RowwiseParallel):
            layout, argument = style.output_layouts[0], "output_layouts"
        else:
            continue
        if not isinstance(layout, Shard) and not any(
            path == p or path.startswith(p + ".") or p == "" for p in prepared
        ):
            raise Refused(
                f"{source}: '{path}' has torch's {type(style).__name__} with {argument}={layout}, but with sequence parallelism it "
                f"stands on a stream of sequence shards. Give it {argument}=Shard(1), use meshtrain's own style, or turn sequence "
                "parallelism off"
            )
