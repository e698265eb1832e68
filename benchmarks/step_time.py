"""Median time of a training step, meshtrain against the plain torch recipe, in alternation on the same ranks; and the
share of our CPU time that goes into comparing the batches of tp peers.

python benchmarks/step_time.py                       # 2x2 and 4x2, dim 128, 256, 512
python benchmarks/step_time.py --meshes 2x2 --dims 256 --rounds 10
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import plain_torch
from meshtrain.launch import launch, preload
from meshtrain.mesh import init_mesh
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, parallelize, state_of
from meshtrain.train.optim import adamw
from meshtrain.train.step import loss_in_model, train_step


def config(dim: int, layers: int) -> LlamaConfig:
    heads = max(8, dim // 64)
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=dim,
        intermediate_size=dim * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=dim // heads,
    )


class Timed:
    """A function, and the CPU seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.process_time()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.process_time() - start


def measure(dp: int, tp: int, dim: int, layers: int, batch: int, seq: int, rounds: int, block: int) -> None:
    """On every rank: time blocks of steps of both contenders, turn by turn; rank 0 prints the ratio of the medians."""
    mesh = init_mesh(dp, tp, "cpu")
    shape = config(dim, layers)
    ours = Llama(shape)
    initialise(ours, seed=0)
    theirs = Llama(shape)
    theirs.load_state_dict(ours.state_dict())
    parallelize(ours, mesh, parallel_plan())
    plain_torch.parallelize(theirs, mesh)
    our_optimizer, their_optimizer = adamw(ours, lr=1e-3), plain_torch.optimizer(theirs, 1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())

    def our_step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        batches = [(inputs, labels)]
        return train_step(
            ours, our_optimizer, batches, max_norm=1.0, tokens=dp * labels.numel(), loss_sum=loss_in_model
        ).loss

    def their_step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        return float(plain_torch.step(theirs, their_optimizer, inputs, labels))

    peers: Any = state_of(ours).peers
    peers.see, peers.contribution = Timed(peers.see), Timed(peers.contribution)
    shares: list[float] = []
    times: dict[str, list[float]] = {"meshtrain": [], "plain torch": []}
    for turn in range(rounds + 1):
        tokens = torch.randint(0, shape.vocab_size, (block, batch // dp, seq + 1), generator=generator)
        for name, step in (("meshtrain", our_step), ("plain torch", their_step)):
            for ids in tokens:
                dist.barrier()
                peers.see.seconds = peers.contribution.seconds = 0.0
                start, busy = time.perf_counter(), time.process_time()
                step(ids[:, :-1], ids[:, 1:])
                elapsed, busy = time.perf_counter() - start, time.process_time() - busy
                if turn:  # the first turn warms up
                    times[name].append(elapsed)
                    if name == "meshtrain":
                        shares.append((peers.see.seconds + peers.contribution.seconds) / busy)
    if dist.get_rank() == 0:
        ours_ms, theirs_ms = (1e3 * statistics.median(times[name]) for name in times)
        print(
            f"{dp}x{tp} dim {dim}: meshtrain {ours_ms:.1f} ms, plain torch {theirs_ms:.1f} ms, ratio {ours_ms / theirs_ms:.3f}; "
            f"comparing the batches of tp peers takes {statistics.median(shares):.2%} of our CPU time",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=["2x2", "4x2"])
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences over the whole mesh")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=5, help="steps of one contender in a row")
    args = parser.parse_args()
    preload()
    for mesh in args.meshes:
        dp, tp = map(int, mesh.split("x"))
        for dim in args.dims:
            given = (dp, tp, dim, args.layers, args.batch, args.seq, args.rounds, args.block)
            if launch(measure, given, world_size=dp * tp, device="cpu"):
                raise SystemExit(1)


if __name__ == "__main__":
    main()
