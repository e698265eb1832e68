"""The mesh is a detail: the same losses, gradient norms and exported bytes on every mesh."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, parallelize
from meshtrain.state.pretrained import save_pretrained
from meshtrain.train.optim import adamw
from meshtrain.train.step import loss_in_model, train_step
from tests.ranks import mesh

MESHES = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (8, 1)]
SEQ, BATCH, STEPS = 12, 16, 20


@dataclass(frozen=True)
class Variant:
    """One way to run the same training."""

    sequence: bool = True
    loss: bool = True
    accumulation: int = 1
    tied: bool = False
    kv: int = 2
    vocab: int = 33
    intermediate: int = 40
    seq: int = SEQ
    recompute: bool = False

    def __str__(self) -> str:
        return "-".join(
            f"{key}={int(value)}" for key, value in asdict(self).items() if value != getattr(Variant(), key)
        )


def config(variant: Variant) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=variant.vocab,
        hidden_size=16,
        intermediate_size=variant.intermediate,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=variant.kv,
        head_dim=4,
        tie_word_embeddings=variant.tied,
        initializer_range=0.2,
    )


def batch(variant: Variant, step: int, dp: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, variant.vocab, (BATCH, variant.seq + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    share = slice(rank * BATCH // dp, (rank + 1) * BATCH // dp)
    pairs = zip(ids[share, :-1].chunk(variant.accumulation), labels[share].chunk(variant.accumulation), strict=True)
    return list(pairs)


def train(dp: int, tp: int, variant: Variant, dtype: torch.dtype, steps: int) -> list[tuple[float, float]]:
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = Llama(config(variant))
    grid = mesh(dp, tp)
    parallelize(
        model,
        grid,
        parallel_plan(),
        sequence_parallel=variant.sequence,
        loss_parallel=variant.loss,
        activation_checkpointing=variant.recompute,
    )
    initialise(model, seed=1)
    optimizer = adamw(model, lr=3e-3)
    results = []
    for step in range(steps):
        pairs = batch(variant, step, dp, grid["dp"].get_local_rank())
        result = train_step(model, optimizer, pairs, max_norm=1.0, loss_sum=loss_in_model)
        results.append((result.loss, result.grad_norm))
    return results


def worst(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def compare(
    ranks: Any, variant: Variant, dtype: torch.dtype, tolerance: float, meshes: list[tuple[int, int]], steps: int
) -> None:
    reference = ranks(1).run(train, 1, 1, variant, dtype, steps)[0]
    if steps == STEPS:
        assert reference[-1][0] < reference[0][0] - 0.1, "the run must learn, or it shows nothing"
    for dp, tp in meshes:
        everyone = ranks(dp * tp).run(train, dp, tp, variant, dtype, steps)
        assert all(result == everyone[0] for result in everyone), "ranks disagree about what they measured"
        assert worst(everyone[0], reference) <= tolerance, f"{dp}x{tp} differs from 1x1"


VARIANTS = [
    Variant(),
    Variant(sequence=False, loss=False, accumulation=2, tied=True),
    Variant(loss=False, accumulation=2, kv=1),
    Variant(sequence=False, tied=True, kv=4),
    Variant(vocab=17, intermediate=37, seq=11, tied=True, accumulation=2),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_losses_and_norms_do_not_depend_on_the_mesh(ranks: Any, variant: Variant) -> None:
    # One rank count a mesh each; the slow test below has all meshes for all variants.
    meshes = MESHES if variant == Variant() else [(1, 4), (2, 2), (4, 2)]
    compare(ranks, variant, torch.float64, 1e-11, meshes, STEPS)


@pytest.mark.timeout(300)
def test_fp32_agrees_to_rounding(ranks: Any) -> None:
    compare(ranks, Variant(accumulation=2), torch.float32, 1e-5, [(4, 1), (2, 2)], STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_combination_on_every_mesh(ranks: Any, sequence: bool, loss: bool, accumulation: int, tied: bool) -> None:
    variant = Variant(sequence, loss, accumulation, tied, kv=2)  # fewer than tp on two of the meshes
    compare(ranks, variant, torch.float64, 1e-11, MESHES, STEPS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("vocab", [257, 50257])
def test_uneven_vocabularies(ranks: Any, vocab: int) -> None:
    compare(ranks, Variant(vocab=vocab, recompute=vocab == 257), torch.float64, 1e-11, [(2, 2), (4, 2), (2, 4)], 3)


def export_digest(dp: int, tp: int, variant: Variant, folder: str) -> dict[str, str]:
    with torch.device("meta"):
        model = Llama(config(variant))
    parallelize(model, mesh(dp, tp), parallel_plan())
    initialise(model, seed=7)
    path = save_pretrained(model, Path(folder) / f"{dp}x{tp}")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [False, True])
def test_exported_initial_weights_are_the_same_bytes(ranks: Any, tmp_path: Path, tied: bool) -> None:
    variant = Variant(vocab=257, intermediate=37, tied=tied)
    reference = ranks(1).run(export_digest, 1, 1, variant, str(tmp_path))[0]
    assert {"config.json", "model.safetensors"} <= set(reference)
    for dp, tp in MESHES:
        assert ranks(dp * tp).run(export_digest, dp, tp, variant, str(tmp_path))[0] == reference, f"{dp}x{tp}"
