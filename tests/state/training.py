"""Training for tests of checkpoints: small models with every kind of cut, a corpus, and jobs that stop and go on elsewhere.

Everything here runs inside the ranks, and goes to them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from meshtrain import adamw, load_checkpoint, parallelize, save_checkpoint
from meshtrain.data import TokenDataset, batches
from meshtrain.parallel import ParallelPlan, initialise
from meshtrain.parallel.materialise import allocate
from meshtrain.state.checkpoint import Checkpoint
from meshtrain.train.loop import train
from meshtrain.train.metrics import StepMetrics
from meshtrain.train.saving import Saving
from tests.cases.models import LM, LM_PLAN, on_meta, whole
from tests.ranks import mesh

SEQ, GLOBAL_BATCH = 6, 8
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


class Noisy(LM):
    """Draws from torch's own generator, whose state a checkpoint has to hold."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1 + 0.1 * torch.rand(()))


class Frozen(LM):
    """Trains a part of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class Kind(NamedTuple):
    """A model, and the vocabulary of its data."""

    make: Callable[[], nn.Module]
    vocab: int = 19
    plan: ParallelPlan = LM_PLAN


# LM: fused gate and up, two KV heads for eight queries, biases, norms; 19 tokens, which no tp divides.
KINDS: dict[str, Kind] = {
    "lm": Kind(LM),
    "tied": Kind(lambda: LM(tied=True)),
    "frozen": Kind(Frozen),
    "dropout": Kind(lambda: LM(dropout=0.1)),
    "noisy": Kind(Noisy),
    **{f"vocabulary-{n}": Kind(lambda n=n: LM(vocab=n, width=8, hidden=12), n) for n in (17, 257, 50257)},
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "meshtrain": lambda model: adamw(model, lr=0.1),
    "torch-adamw": lambda model: torch.optim.AdamW(trainable(model), lr=0.1),
    "sgd": lambda model: torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Row(NamedTuple):
    """What a step reports, but for its time."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int


def rate(step: int) -> float:
    """Differs in every step, so that a resumed run shows where it thinks it is."""
    return 0.01 + 0.002 * (step % 7)


@dataclass
class Job:
    """A run on this rank, between two steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: TokenDataset
    dp: int
    tp: int
    global_batch: int = GLOBAL_BATCH
    micro_batch: int | None = None
    step: int = 0
    tokens: int = 0
    samples: int = 0
    learning_rate: Callable[[int], float] = rate
    rows: list[Row] = field(default_factory=list)

    def go(self, steps: int, saving: Saving | None = None) -> list[Row]:
        """Go on up to `steps` steps; return the rows of those made (`rows` has them all, after an error too)."""
        before = len(self.rows)
        offset = self.samples - self.step * self.global_batch

        def given(step: int) -> list[tuple[Tensor, Tensor]]:
            own = self.dataset.batch(
                step - 1, global_batch=self.global_batch, dp=self.dp, dp_rank=mesh(self.dp, self.tp).get_local_rank("dp"),
                micro_batch=self.micro_batch, offset=offset,
            )  # fmt: skip
            return [(batch.inputs, batch.labels) for batch in own]

        def report(metrics: StepMetrics) -> None:
            self.rows.append(Row(metrics.step, metrics.loss, metrics.grad_norm, metrics.lr, metrics.tokens))

        train(
            self.model, self.optimizer, given, steps=steps, learning_rate=self.learning_rate, max_norm=0.5, report=report,
            done=self.step, seen=self.tokens, saving=saving,
        )  # fmt: skip
        self.samples += (steps - self.step) * self.global_batch
        made = self.rows[before:]
        self.step, self.tokens = steps, made[-1].tokens if made else self.tokens
        return made

    def run(self) -> dict[str, int]:
        return {"tokens": self.tokens, "samples": self.samples}

    def save(self, path: Path, **how: Any) -> None:
        save_checkpoint(self.model, self.optimizer, path, step=self.step, run=self.run(), **how)

    def load(self, path: Path) -> Checkpoint:
        found = load_checkpoint(self.model, self.optimizer, path)
        self.step, self.tokens, self.samples = found.step, found.run["tokens"], found.run["samples"]
        return found

    def values(self) -> dict[str, Tensor]:
        """Every weight and moment, whole: {"weight a": ..., "exp_avg a": ...}."""
        found = {f"weight {name}": t for name, t in whole(self.model, lambda p: p.detach()).items()}
        kinds = sorted({kind for state in self.optimizer.state.values() for kind, t in state.items() if is_moment(t)})
        for kind in kinds:
            moments = whole(self.model, lambda p, kind=kind: self.optimizer.state.get(p, {}).get(kind))
            found.update({f"{kind} {name}": t for name, t in moments.items() if t is not None})
        return {key: t for key, t in found.items() if t is not None}

    def numbers(self) -> list[float]:
        """AdamW's step of each parameter, in order."""
        states = (self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters())
        return [float(state["step"]) for state in states if "step" in state]


def is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def corpus(vocab: int) -> TokenDataset:
    """Some 80 sequences in an order that depends on the seed."""
    ids = torch.randint(0, vocab, (80 * SEQ + 1,), generator=torch.Generator().manual_seed(5))
    return TokenDataset(ids, SEQ, seed=1)


def job(
    dp: int, tp: int, kind: str = "lm", optimizer: str = "meshtrain", dtype: torch.dtype = torch.float64, *,
    empty: bool = False, **how: Any,
) -> Job:  # fmt: skip
    """A run at its beginning. empty: with parameters that are to be loaded, full of nonsense now."""
    chosen = KINDS[kind]
    model = parallelize(on_meta(chosen.make, dtype), mesh(dp, tp), chosen.plan, seed=3)
    if empty:
        allocate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(torch.nan)
    else:
        initialise(model, seed=3)
    return Job(model, OPTIMIZERS[optimizer](model), corpus(chosen.vocab), dp, tp, **how)


def resumed(path: Path, dp: int, tp: int, *args: Any, **how: Any) -> Job:
    """A run that goes on from a checkpoint."""
    again = job(dp, tp, *args, empty=True, **how)
    again.load(path)
    return again


def assert_equal(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert set(got) == set(wanted)
    for name, right in wanted.items():
        assert got[name].dtype == right.dtype, name
        assert torch.equal(got[name], right), f"{name} differs by {(got[name] - right).abs().max()}"


def files_of(path: Path) -> dict[str, bytes]:
    """The bytes of every file of tensors that the ranks wrote together."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*.safetensors"))
        if file.name != "generators.safetensors"
    }


@contextmanager
def samples_noted() -> Iterator[list[int]]:
    """The numbers of the samples that this rank takes meanwhile."""
    seen: list[int] = []
    real = batches.sequence_of_sample

    def noted(sample: int, count: int, seed: int) -> int:
        seen.append(sample)
        return real(sample, count, seed)

    with mock.patch.object(batches, "sequence_of_sample", noted):
        yield seen
