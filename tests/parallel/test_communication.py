"""A step communicates what docs/communication.md derives, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, parallelize
from meshtrain.train.optim import adamw
from meshtrain.train.step import loss_in_model, train_step
from tests.ranks import mesh

LAYERS, HIDDEN, VOCAB, SEQ, BATCH = 3, 16, 32, 8, 8
KINDS = {
    "_allgather_base_": "all_gather",
    "allreduce_": "all_reduce",
    "alltoall_base_": "reduce_scatter",  # how gloo's are run: same bytes, less time
    "_reduce_scatter_base_": "reduce_scatter",
}


class Recorder(TorchDispatchMode):
    """Counts collectives and their bytes (of the larger side) by kind and by size of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            assert name in KINDS, f"an unexpected collective: {name}"
            tensors = [
                t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)
            ]
            group = next(
                dist.ProcessGroup.unbox(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            key = KINDS[name], group.size()
            self.calls[key] += 1
            self.bytes[key] += max(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def one_step(
    dp: int, tp: int, sequence: bool, accumulation: int, kv: int
) -> tuple[dict[Any, int], dict[Any, int], dict[str, int]]:
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=kv, head_dim=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = Llama(shape)
    grid = mesh(dp, tp)
    parallelize(model, grid, parallel_plan(), sequence_parallel=sequence)
    initialise(model)
    optimizer = adamw(model, lr=1e-3)
    ids = torch.randint(0, VOCAB, (accumulation, BATCH // dp, SEQ + 1))
    dist.broadcast(ids, group=grid["tp"].get_group(), group_src=0)
    pairs = [(x[:, :-1], x[:, 1:]) for x in ids]
    train_step(model, optimizer, pairs, tokens=accumulation * BATCH * SEQ, loss_sum=loss_in_model)
    with Recorder() as seen:
        train_step(model, optimizer, pairs, tokens=accumulation * BATCH * SEQ, loss_sum=loss_in_model)
    sizes = {
        "parameters": sum(4 * p.to_local().numel() * dp for n, p in model.named_parameters()),
        "root": sum(4 * p.to_local().numel() * dp for n, p in model.named_parameters() if ".layers." not in n),
        "partial": sum(
            4 * p.to_local().numel()
            for n, p in model.named_parameters()
            if "norm" in n or (kv < tp and ("k_proj" in n or "v_proj" in n))
        ),
    }
    return dict(seen.calls), dict(seen.bytes), sizes


@pytest.mark.parametrize(("accumulation", "kv"), [(1, 2), (2, 2), (1, 1)])
def test_collectives_with_sequence_parallelism(ranks: Any, accumulation: int, kv: int) -> None:
    dp, tp, n = 4, 2, accumulation
    calls, volume, sizes = ranks(8).run(one_step, dp, tp, True, accumulation, kv)[0]
    activation = 4 * (BATCH // dp) * SEQ * HIDDEN
    # tp: per layer 2 + 2 forward and their mirrors backward; the embedding and the head have half of that each.
    assert calls[("reduce_scatter", tp)] == n * (4 * LAYERS + 2)
    assert volume[("reduce_scatter", tp)] == n * (4 * LAYERS + 2) * activation
    assert calls[("all_gather", tp)] == n * (4 * LAYERS + 2 + 1)
    logsumexp = 4 * tp * 2 * (BATCH // dp) * SEQ
    assert volume[("all_gather", tp)] == n * ((4 * LAYERS + 2) * activation + logsumexp)
    # once per step, whatever the accumulation: the partial gradients over tp, the gradients over dp, the scalars
    assert calls[("all_reduce", tp)] == 1
    assert volume[("all_reduce", tp)] == sizes["partial"]
    assert calls[("all_gather", dp)] == n * (2 * LAYERS + 1)
    assert volume[("all_gather", dp)] == n * (2 * sizes["parameters"] - sizes["root"])
    assert calls[("reduce_scatter", dp)] == LAYERS + 1
    assert volume[("reduce_scatter", dp)] == sizes["parameters"]
    assert calls[("all_reduce", dp * tp)] == 1
    assert volume[("all_reduce", dp * tp)] <= 8 * 8, "a handful of fp64 scalars"
    assert set(calls) == {(k, s) for k in ("all_gather", "reduce_scatter") for s in (dp, tp)} | {
        ("all_reduce", tp),
        ("all_reduce", dp * tp),
    }


def test_collectives_without_sequence_parallelism(ranks: Any) -> None:
    dp, tp = 4, 2
    calls, volume, _ = ranks(8).run(one_step, dp, tp, False, 1, 2)[0]
    activation = 4 * (BATCH // dp) * SEQ * HIDDEN
    # The two all-reduces of Megatron-LM per layer, forward and backward; one each for the embedding and the head.
    assert calls[("all_reduce", tp)] == 4 * LAYERS + 2
    assert volume[("all_reduce", tp)] == (4 * LAYERS + 2) * activation
    assert calls[("all_gather", tp)] == 1, "only the loss"
    assert ("reduce_scatter", tp) not in calls
