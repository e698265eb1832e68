"""Small models, their plans, and what the case tests share: a plain reference, the same model on a mesh, and a view of
what all ranks hold together. Everything here runs inside the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.parallel import (
    ParallelPlan,
    column,
    embedding,
    head,
    heads,
    initialise,
    packed_column,
    parallelize,
    replicate,
    row,
    sequence,
    state_of,
)
from tests.ranks import mesh

VOCAB = 19
Pick = Callable[[nn.Parameter], Tensor | None]


class MLP(nn.Module):
    """LayerNorm, a column-wise and a row-wise layer, with a residual."""

    def __init__(self, width: int = 8, hidden: int = 16, out: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out or width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def encode(self, x: Tensor) -> Tensor:
        """An entry point besides forward."""
        return self.up(self.norm(x))


MLP_PLAN = ParallelPlan({"norm": replicate(), "up": column(), "down": row()})


class Block(nn.Module):
    """Pre-norm attention with shared key and value heads, and a gated MLP with a fused gate and up."""

    def __init__(self, width: int, hidden: int, queries: int, keys: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = width // queries
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, keys * self.head_dim)
        self.v = nn.Linear(width, keys * self.head_dim, bias=False)
        self.o = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q(h), self.k(h), self.v(h)))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.drop(self.o(mixed))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class LM(nn.Module):
    """A language model with everything that tp has to treat in a way of its own."""

    def __init__(
        self, vocab: int = VOCAB, width: int = 16, hidden: int = 20, queries: int = 8, keys: int = 2, *,
        tied: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden, queries, keys, dropout) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


LM_STYLES = {
    "embed": embedding(),
    "layers.*.norm*": sequence(),
    "layers.*.q": heads(8),
    "layers.*.[kv]": heads(2, shared_by=8),
    "layers.*.o": row(),
    "layers.*.gate_up": packed_column(parts=2),
    "layers.*.down": row(),
    "layers.*.drop": sequence(),
    "norm": sequence(),
    "lm_head": head(),
}
LM_PLAN = ParallelPlan(LM_STYLES, ("layers.*",))


def on_meta(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return make().to(dtype)


def plain(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Module:
    """The model in one process, with the initial values that it has on any mesh."""
    return initialise(on_meta(make, dtype), seed=seed)


def sharded(
    make: Callable[[], nn.Module], plan: ParallelPlan, dp: int, tp: int, dtype: torch.dtype = torch.float64, seed: int = 3,
    **options: Any,
) -> nn.Module:  # fmt: skip
    """The model on a mesh."""
    return initialise(parallelize(on_meta(make, dtype), mesh(dp, tp), plan, **options), seed=seed)


def share(x: Tensor, dp: int, tp: int) -> Tensor:
    """The rows of a global batch that this dp rank has."""
    return x.chunk(dp)[mesh(dp, tp).get_local_rank("dp")]


def tokens(batch: int = 8, seq: int = 10, seed: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of a global batch, the same on every rank."""
    ids = torch.randint(0, vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gather(value: Any) -> list[Any]:
    """What each rank has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def grad_of(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def value_of(parameter: nn.Parameter) -> Tensor | None:
    return parameter.detach()


def whole(model: nn.Module, pick: Pick = grad_of) -> dict[str, Tensor | None]:
    """Each parameter's gradient (or whatever `pick` takes), put together from all ranks. Replicas must be equal bit by bit."""
    state = state_of(model)
    state.reshard()
    mine = {layout.name: None if (t := pick(p)) is None else t.to_local().detach() for layout, p in state.parameters()}
    everyone = gather(mine)
    result: dict[str, Tensor | None] = {}
    for layout in state.layouts:
        held = [shards[layout.name] for shards in everyone]
        if held[0] is None:
            assert all(shard is None for shard in held), f"{layout.name}: ranks disagree on whether there is a gradient"
            result[layout.name] = None
            continue
        full, seen = torch.empty(layout.shape, dtype=held[0].dtype), torch.zeros(layout.shape, dtype=torch.bool)
        for (dp, tp), shard in zip(state.sizes.coordinates(), held, strict=True):
            for block in layout.blocks(dp, tp):
                there, part = full[block.of_global()], shard[block.of_local()]
                if seen[block.of_global()].any():
                    assert torch.equal(there, part), f"{layout.name}: the replica of tp rank {tp} differs"
                there.copy_(part)
                seen[block.of_global()] = True
        assert seen.all(), layout.name
        result[layout.name] = full
    return result


def of_plain(model: nn.Module, pick: Pick = grad_of) -> dict[str, Tensor | None]:
    return {name: pick(p) for name, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], tol: float = 1e-11) -> None:
    """Equal by name, to `tol` relative to the largest element."""
    assert set(got) == set(wanted)
    for name, right in wanted.items():
        left = got[name]
        assert (left is None) == (right is None), f"{name}: {'no' if left is None else 'a'} gradient"
        if left is not None and right is not None:
            error = (left - right).abs().max() / right.abs().max().clamp(min=1e-3)
            assert error <= tol, f"{name}: off by {error:.3g}"


class Collectives(TorchDispatchMode):
    """Records the collectives that run inside it, as (name, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            tensor = next(t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor))
            self.seen.append((name.strip("_").replace("allreduce", "all_reduce"), tensor.dtype))
        return func(*args, **(kwargs or {}))

    def count(self, part: str) -> int:
        return sum(part in name for name, _ in self.seen)

    def kinds(self) -> Counter[tuple[str, torch.dtype]]:
        return Counter(self.seen)
