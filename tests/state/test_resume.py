"""A run that stops and goes on is the run that never stopped: bit for bit on its mesh, to rounding on any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.state.training import (
    GLOBAL_BATCH,
    KINDS,
    MESHES,
    OPTIMIZERS,
    SEQ,
    Job,
    Row,
    assert_equal,
    files_of,
    job,
    resumed,
    samples_noted,
)

pytestmark = pytest.mark.timeout(120)
WORLD = {(dp, tp): dp * tp for dp, tp in MESHES}


# On the same mesh.


def stop_anywhere(
    dp: int, tp: int, kind: str, optimizer: str, dtype: str, steps: int, stops: list[int], path: Path
) -> None:
    """One run without a stop, which saves on its way; from each of its checkpoints another one goes on to the end."""
    chosen = (kind, optimizer, getattr(torch, dtype))
    run = job(dp, tp, *chosen)
    for stop in stops:
        run.go(stop)
        run.save(path / f"step-{stop:08}")
    run.go(steps)
    assert len({row.loss for row in run.rows}) == steps, "every step is another one"
    for stop in stops:
        again = resumed(path / f"step-{stop:08}", dp, tp, *chosen)
        again.go(steps)
        assert again.rows == run.rows[stop:]
        assert_equal(again.values(), run.values())
        assert again.numbers() == run.numbers()


def stored(path: Path) -> dict[str, Tensor]:
    """The weights and moments of a checkpoint, by the safetensors library: {"weight a": ..., "exp_avg a": ...}."""
    kinds = {"weight": path / "model.safetensors"}
    kinds |= {file.stem: file for file in (path / "training").glob("*.safetensors") if file.stem != "generators"}
    return {f"{kind} {name}": tensor for kind, file in kinds.items() for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("dp", "tp", "dtype"), [(1, 1, "float64"), (2, 2, "float32")])
def test_on_the_same_mesh_every_bit_goes_on(ranks: Any, tmp_path: Path, dp: int, tp: int, dtype: str) -> None:
    ranks(dp * tp).run(stop_anywhere, dp, tp, "lm", "meshtrain", dtype, 5, [0, 3], tmp_path)


def stop_after_each(steps: int, path: Path) -> None:
    """A run that saves after every step; from each of its checkpoints another one makes the next step."""
    chosen = (1, 1, "vocabulary-17", "meshtrain", torch.float32)
    run = job(*chosen)
    for stop in range(steps):
        run.save(path)
        again = resumed(path, *chosen)
        assert again.go(stop + 1) == run.go(stop + 1)
        assert_equal(again.values(), run.values())


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_from_each_of_many_steps(ranks: Any, tmp_path: Path, steps: int) -> None:
    ranks(1).run(stop_after_each, steps, tmp_path / "saved", timeout=100.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_on_every_mesh(ranks: Any, tmp_path: Path, dp: int, tp: int, dtype: str) -> None:
    ranks(dp * tp).run(stop_anywhere, dp, tp, "tied", "meshtrain", dtype, 12, list(range(12)), tmp_path, timeout=110.0)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("dropout", "meshtrain"),
        ("vocabulary-257", "meshtrain"),
        ("lm", "torch-adamw"),
        ("lm", "sgd"),
        ("frozen", "sgd"),
    ],
)
def test_models_and_optimizers_of_every_kind_go_on(ranks: Any, tmp_path: Path, kind: str, optimizer: str) -> None:
    ranks(4).run(stop_anywhere, 2, 2, kind, optimizer, "float32", 3, [2], tmp_path)


def test_torchs_own_generator_goes_on_too(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(stop_anywhere, 2, 1, "noisy", "meshtrain", "float32", 3, [1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_with_every_optimizer(ranks: Any, tmp_path: Path, kind: str, optimizer: str) -> None:
    # What is drawn by torch differs between tp ranks, which would train replicas apart.
    dp, tp = (4, 1) if kind == "noisy" else (2, 2)
    ranks(4).run(stop_anywhere, dp, tp, kind, optimizer, "float32", 4, [1, 2], tmp_path, timeout=110.0)


def test_frozen_parameters_have_no_moments_and_are_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(stop_anywhere, 2, 2, "frozen", "meshtrain", "float32", 3, [2], tmp_path)
    found = stored(tmp_path / "step-00000002")
    frozen = {"embed.weight", *(name for name, _ in KINDS["lm"].make().layers[0].named_parameters("layers.0"))}
    every = {name.partition(" ")[2] for name in found if name.startswith("weight ")}
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {name.partition(" ")[2] for name in found if name.startswith(f"{kind} ")} == every - frozen
    assert frozen < every


def test_tied_weights_are_stored_once(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(stop_anywhere, 2, 2, "tied", "meshtrain", "float32", 3, [2], tmp_path)
    found = stored(tmp_path / "step-00000002")
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert [name for name in found if name in (f"{kind} embed.weight", f"{kind} lm_head.weight")] == [
            f"{kind} embed.weight"
        ]


# From one mesh to another. The reference never stops, and has one rank.

STEPS, STOP = 6, 3


def never_stopped(kind: str) -> list[Row]:
    return job(1, 1, kind).go(STEPS)


def begin(dp: int, tp: int, kind: str, path: Path) -> list[Row]:
    run = job(dp, tp, kind)
    run.go(STOP)
    run.save(path, max_shard_size=2000)
    return run.rows


def go_on(
    dp: int, tp: int, kind: str, path: Path, again: Path
) -> tuple[list[Row], list[int], dict[str, Tensor] | None]:
    run = resumed(path, dp, tp, kind)
    values = run.values()
    run.save(again, max_shard_size=2000)
    with samples_noted() as samples:
        run.go(STEPS)
    return run.rows, samples if mesh_rank(run) else [], values if torch.distributed.get_rank() == 0 else None


def mesh_rank(run: Job) -> bool:
    """Whether this rank is the first of its tp ranks, which take the same samples."""
    return torch.distributed.get_rank() % run.tp == 0


def sharded(path: Path) -> dict[str, Tensor]:
    """The same as `stored`, of a checkpoint of several files of each kind."""
    found = {}
    for folder, base in ((path, "model"), (path / "training", "exp_avg"), (path / "training", "exp_avg_sq")):
        index = json.loads((folder / f"{base}.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 2
        held = {file: load_file(folder / file) for file in set(index.values())}
        found |= {f"{'weight' if base == 'model' else base} {name}": held[file][name] for name, file in index.items()}
    return found


def check_pair(
    ranks: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int], reference: list[Row], kind: str
) -> None:
    name = "x".join(map(str, before))
    saved, again = tmp_path / name, tmp_path / f"{name}-on-{'x'.join(map(str, after))}"
    if not saved.exists():
        for rows in ranks(WORLD[before]).run(begin, *before, kind, saved):
            check_rows(rows, reference[:STOP])
    results = ranks(WORLD[after]).run(go_on, *after, kind, saved, again)
    assert_equal(results[0][2], sharded(saved))
    assert files_of(again) == files_of(saved), "the bytes do not depend on the mesh"
    for rows, _, _ in results:
        check_rows(rows, reference[STOP:])
    taken = sorted(sample for _, samples, _ in results for sample in samples)
    assert taken == list(range(STOP * GLOBAL_BATCH, STEPS * GLOBAL_BATCH)), "no sample is lost or taken twice"


def check_rows(rows: list[Row], wanted: list[Row]) -> None:
    assert [(row.step, row.lr, row.tokens) for row in rows] == [(row.step, row.lr, row.tokens) for row in wanted]
    for row, right in zip(rows, wanted, strict=True):
        assert math.isclose(row.loss, right.loss, rel_tol=1e-11), row.step
        assert math.isclose(row.grad_norm, right.grad_norm, rel_tol=1e-11), row.step


@pytest.fixture(scope="module")
def reference(ranks: Any) -> Any:
    """Kind -> the rows of the run that never stopped."""
    seen: dict[str, list[Row]] = {}

    def rows_of(kind: str) -> list[Row]:
        if kind not in seen:
            (seen[kind],) = ranks(1).run(never_stopped, kind)
        return seen[kind]

    return rows_of


@pytest.mark.parametrize(("before", "after"), list(zip(MESHES, [MESHES[i] for i in (3, 2, 4, 5, 0, 1)])))
def test_a_run_goes_on_on_another_mesh(ranks: Any, tmp_path: Path, reference: Any, before: Any, after: Any) -> None:
    check_pair(ranks, tmp_path, before, after, reference("lm"), "lm")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "tied", "frozen", "vocabulary-17", "vocabulary-257"])
@pytest.mark.parametrize("before", MESHES)
def test_and_on_every_mesh_from_every_mesh(ranks: Any, tmp_path: Path, reference: Any, before: Any, kind: str) -> None:
    for after in MESHES:
        check_pair(ranks, tmp_path, before, after, reference(kind), kind)


# Another division of the batch.


def with_accumulation(dp: int, tp: int, path: Path) -> list[Row]:
    run = resumed(path, dp, tp, micro_batch=1)
    return run.go(STEPS)


def test_the_micro_batch_may_change(ranks: Any, tmp_path: Path, reference: Any) -> None:
    ranks(4).run(begin, 2, 2, "lm", tmp_path / "saved")
    for rows in ranks(2).run(with_accumulation, 2, 1, tmp_path / "saved"):
        check_rows(rows, reference("lm")[STOP:])


def with_another_batch(dp: int, tp: int, path: Path) -> tuple[list[int], list[int]]:
    """Go on with batches of 4, stop, and go on with batches of 12."""
    with samples_noted() as samples:
        run = resumed(path, dp, tp, global_batch=4)
        run.go(STOP + 2)
        run.save(path.with_name("second"))
        again = resumed(path.with_name("second"), 1, dp * tp, global_batch=12)
        again.go(STOP + 3)
    assert again.tokens == again.samples * SEQ
    # Of the second mesh's ranks all take the same samples, of the first's each its own.
    return samples[: 8 // dp], samples[8 // dp :]


def test_the_global_batch_may_change_and_each_sample_comes_once(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(begin, 1, 1, "lm", tmp_path / "saved")
    results = ranks(2).run(with_another_batch, 2, 1, tmp_path / "saved")
    begun = STOP * GLOBAL_BATCH
    assert sorted(sample for first, _ in results for sample in first) == list(range(begun, begun + 8))
    assert all(second == list(range(begun + 8, begun + 20)) for _, second in results)
