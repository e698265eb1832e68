"""Styles of the two modules that have a row per token: the embedding and the output head."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..errors import Refused
from .collectives import gather_last
from .context import LocalParameters
from .cross_entropy import VocabShard, linear_cross_entropy
from .layout import chunk_interval
from .style import Cut, Forward, Scope, Site, Style, check_nonempty, check_own_forward, check_plain_parameters


@dataclass
class Embedding(Style):
    """Cut the rows of an embedding over tp, and begin the stream: ids [batch, seq], whole -> stream. A rank looks up
    the ids of its own rows; the others give zeros, and the sum over tp has every row."""

    name = "embedding"

    begins_stream = True

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        if not isinstance(module, nn.Embedding):
            raise Refused(
                f"'{path}' is a {type(module).__name__}, and embedding() is for nn.Embedding. Use column(), row() or replicate() for it"
            )
        check_own_forward(module, nn.Embedding, path, "embedding()")
        check_plain_parameters(module, path, "embedding()")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise Refused(
                    f"'{path}': an nn.Embedding with {option}={getattr(module, option)!r} cannot be cut over tp, since the "
                    "option needs the whole table or all ids. Use replicate() for it, or leave the option out"
                )
        check_nonempty(module.num_embeddings, "the vocabulary", path, scope.sizes.tp)
        return {"weight": Cut(0)}

    def forward(self, site: Site) -> Forward:
        tp, path, layout = site.tp, site.path, site.layouts["weight"]
        module = cast(nn.Embedding, site.module)
        (start, stop), vocab = layout.tp_segments(tp.axis.index)[0], layout.shape[0]
        padding = module.padding_idx

        @site.input_first
        def forward(ids: Tensor) -> Tensor:
            weight = tp.local(cast(nn.Parameter, module._parameters["weight"]), path)
            if tp.axis.size == 1:
                return tp.begin(torch.nn.functional.embedding(ids, weight, padding))
            if not torch.compiler.is_compiling() and ids.device.type == "cpu" and ids.numel():
                low, high = torch.aminmax(ids)
                if low < 0 or high >= vocab:
                    raise IndexError(
                        f"'{path}': token id {int(low if low < 0 else high)} is outside the vocabulary of {vocab}"
                    )
            own = ids - start
            elsewhere = (own < 0) | (own >= stop - start)
            out = torch.nn.functional.embedding(own.masked_fill(elsewhere, 0), weight)
            out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
            if padding is not None:
                out = torch.where((ids == padding).unsqueeze(-1), out.detach(), out)
            return tp.begin(out)

        return forward


@dataclass
class Head(Style):
    """Cut the vocabulary of the output layer, and end the stream: stream -> logits, as a DTensor that is cut on the
    vocabulary with loss parallelism (`meshtrain.cross_entropy` and torch's `loss_parallel` take it), else whole.

    Called with labels it gives the sum of the token losses, and never holds the logits of more than a chunk.
    """

    name = "head"

    ends_stream = True

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        if not isinstance(module, nn.Linear):
            raise Refused(
                f"'{path}' is a {type(module).__name__}, and head() is for nn.Linear. Use embedding() or replicate() for it"
            )
        if "labels" not in inspect.signature(module.forward).parameters:  # a head that takes labels knows this style
            check_own_forward(module, nn.Linear, path, "head()")
        check_plain_parameters(module, path, "head()")
        check_nonempty(module.out_features, "the vocabulary", path, scope.sizes.tp)
        return {"weight": Cut(0)} | ({"bias": Cut(0)} if module.bias is not None else {})

    def forward(self, site: Site) -> Forward:
        tp, path, module, layout = site.tp, site.path, site.module, site.layouts["weight"]
        vocab = layout.shape[0]
        start = chunk_interval(vocab, tp.axis.size, tp.axis.index)[0]
        step = chunk_interval(vocab, tp.axis.size, 0)[1]
        shard = VocabShard(start, vocab, step, tp.axis, tp.loss_parallel)

        @site.input_first
        def forward(x: Tensor, labels: Tensor | None = None) -> Tensor:
            whole = tp.enter(x, path)
            tp.reset()
            if labels is not None:
                held = {name: tp.local(p, path) for name, p in module._parameters.items() if p is not None}
                return linear_cross_entropy(whole, held["weight"], labels, bias=held.get("bias"), shard=shard)
            with LocalParameters(tp, site.within):
                # Not the module's own forward: it may take labels, or do more than the product.
                logits = nn.Linear.forward(cast(nn.Linear, module), whole)
            if tp.axis.size == 1:
                return logits
            if not tp.loss_parallel:
                return gather_last(logits, vocab, start, step, tp.axis)
            shape = torch.Size((*logits.shape[:-1], vocab))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                logits, tp.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride
            )

        return forward
