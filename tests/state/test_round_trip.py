"""Weights through files, on every mesh: bit-equal, readable by the safetensors library, no byte too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshtrain.parallel.layout import MeshSizes
from meshtrain.state import export, inspect_pretrained, read_header
from meshtrain.state.dtypes import NAME_OF
from tests.state import simulated

BUFFERS = {"steps": torch.tensor(7), "mask": torch.tensor([True, False, True]), "scale": torch.tensor(0.5)}


@pytest.mark.parametrize(("dp", "tp"), simulated.MESHES)
def test_files_are_the_same_bytes_from_every_mesh_and_from_the_library(dp: int, tp: int, tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    simulated.save(simulated.layouts(dp, tp), whole, tmp_path / "out", BUFFERS)
    save_file({**whole, **BUFFERS}, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.safetensors", "out"]


@pytest.mark.parametrize(("dp", "tp"), simulated.MESHES)
def test_loading_on_a_mesh_gives_every_rank_its_elements_and_reads_no_others(dp: int, tp: int, tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    save_file(whole, tmp_path / "model.safetensors")
    layouts = simulated.layouts(dp, tp)
    for coordinate in layouts[0].sizes.coordinates():
        shards, staging = simulated.load(layouts, tmp_path, coordinate)
        for one in layouts:
            assert torch.equal(shards[one.name], simulated.cut(whole[one.name], one, coordinate)), (
                one.name,
                coordinate,
            )
        assert staging.traffic.read == sum(shard.nbytes for shard in shards.values())


def test_writing_moves_each_byte_once(tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    from meshtrain.state.placing import write_own
    from meshtrain.state.specs import specs_of
    from meshtrain.state.transfer import Staging
    from meshtrain.state.writer import Part, plan_save

    layouts = simulated.layouts(2, 4)
    plan = plan_save(specs_of(layouts))
    for file in plan.files:
        (tmp_path / file.name).write_bytes(file.head)
    staging = Staging(4096)
    for coordinate in layouts[0].sizes.coordinates():
        shards = {one.name: simulated.cut(whole[one.name], one, coordinate) for one in layouts}
        write_own([Part(plan, shards)], coordinate, tmp_path, staging)
    # What tp replicates is cut over dp and written by the first tp rank alone.
    assert staging.traffic.written == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_convert_as_torch_does_both_ways(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    layouts = simulated.layouts(2, 2)
    simulated.save(layouts, whole, tmp_path / "out", dtype=dtype)
    stored = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in whole.items():
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], tensor.to(dtype))
    shards, _ = simulated.load(layouts, tmp_path / "out", (1, 1))
    for one in layouts:
        expected = simulated.cut(whole[one.name].to(dtype).float(), one, (1, 1))
        assert torch.equal(shards[one.name], expected)


def test_a_value_that_float16_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    whole["bias"][1] = 1e5
    with pytest.raises(RuntimeError, match=r"bias: holds values beyond 65504.*bfloat16"):
        simulated.save(simulated.layouts(2, 2), whole, tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_case_e5_key_to_file_map_and_total_size_are_right_when_sharded(tmp_path: Path) -> None:
    whole = simulated.whole_tensors()
    simulated.save(simulated.layouts(2, 4), whole, tmp_path / "out", BUFFERS, max_shard_size=1500)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    every = {**whole, **BUFFERS}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in every.values())
    assert index["weight_map"].keys() == every.keys()
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    for name in names:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():  # noqa: SIM118
                assert index["weight_map"][key] == name
                assert torch.equal(file.get_tensor(key), every[key])
            assert len(file.keys()) == 1 or (tmp_path / "out" / name).stat().st_size < 1500 + 2000


def test_case_e7_replicas_and_scalars_keep_their_shapes_whatever_their_values(tmp_path: Path) -> None:
    sizes = MeshSizes(2, 2)
    layouts = [
        simulated.layout("norm.weight", (640,), None, (), sizes),
        simulated.layout("w", (8, 8), 0, (8,), sizes),
    ]
    whole = {"norm.weight": torch.ones(640), "w": torch.ones(8, 8)}
    simulated.save(layouts, whole, tmp_path / "out", {"count": torch.tensor(3.0)})
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        "norm.weight": (640,), "w": (8, 8), "count": (),
    }  # fmt: skip
    assert stored["count"].item() == 3.0


def test_buffers_are_loaded_whole_on_every_rank(tmp_path: Path) -> None:
    simulated.save(simulated.layouts(1, 1), simulated.whole_tensors(), tmp_path / "out", BUFFERS)
    for coordinate in [(0, 0), (1, 1)]:
        fresh = {name: torch.zeros_like(buffer) for name, buffer in BUFFERS.items()}
        simulated.load(simulated.layouts(2, 2), tmp_path / "out", coordinate, fresh)
        for name, buffer in BUFFERS.items():
            assert torch.equal(fresh[name], buffer)


def test_case_f20_a_fused_weight_saved_at_tp_2_loads_at_tp_4_and_tp_1(tmp_path: Path) -> None:
    whole = {"gate_up": torch.arange(16.0 * 3).view(16, 3)}
    at = {tp: simulated.layout("gate_up", (16, 3), 0, (8, 8), MeshSizes(1, tp)) for tp in (1, 2, 4)}
    simulated.save([at[2]], whole, tmp_path / "out")
    for tp in (1, 4):
        for rank in range(tp):
            shards, _ = simulated.load([at[tp]], tmp_path / "out", (0, rank))
            gate, up = whole["gate_up"].chunk(2)
            assert torch.equal(shards["gate_up"], torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))


@pytest.mark.parametrize("shape", [(1, 17), (17, 1), (5, 7)])
@pytest.mark.parametrize("tp_dim", [0, 1])
def test_case_f7_small_uneven_weights_load_exactly_on_every_rank(
    shape: tuple[int, int], tp_dim: int, tmp_path: Path
) -> None:
    one = simulated.layout("w", shape, tp_dim, (shape[tp_dim],), MeshSizes(2, 2))
    whole = torch.randn(shape)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    for coordinate in one.sizes.coordinates():
        shards, _ = simulated.load([one], tmp_path, coordinate)
        assert torch.equal(shards["w"], simulated.cut(whole, one, coordinate))


def test_case_d20_ranks_with_an_empty_shard_save_and_load(tmp_path: Path) -> None:
    at = {tp: simulated.layout("w", (3, 5), 0, (3,), MeshSizes(2, tp)) for tp in (2, 8)}
    assert at[8].local_shape(1, 7) == (0, 5)
    whole = {"w": torch.randn(3, 5)}
    simulated.save([at[8]], whole, tmp_path / "out")
    for layout in at.values():
        for coordinate in layout.sizes.coordinates():
            shards, _ = simulated.load([layout], tmp_path / "out", coordinate)
            assert torch.equal(shards["w"], simulated.cut(whole["w"], layout, coordinate))


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    one = simulated.layout("embed.weight", (17, 4), 0, (17,), MeshSizes(1, 1), aliases=("head.weight",))
    weight = torch.randn(17, 4)
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        file = tmp_path / f"{len(names)}{names[0]}.safetensors"
        save_file({name: weight.clone() for name in names}, file)
        shards, _ = simulated.load([one], file, (0, 0))
        assert torch.equal(shards["embed.weight"], weight)


def test_copies_of_a_tied_weight_that_differ_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    one = simulated.layout("embed.weight", (17, 4), 0, (17,), MeshSizes(1, 1), aliases=("head.weight",))
    weight = torch.randn(17, 4)
    other = weight.clone()
    other[-1, -1] += 1
    save_file({"embed.weight": weight, "head.weight": other}, tmp_path / "both.safetensors")
    with pytest.raises(ValueError, match=r"embed\.weight, head\.weight are one tied parameter.*tie_word_embeddings"):
        simulated.load([one], tmp_path / "both.safetensors", (0, 0))


_dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
_shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_keys = st.text(
    st.characters(codec="utf-8", categories=("L", "N")) | st.sampled_from("._-"), min_size=1, max_size=12
).filter(lambda key: key != "__metadata__")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_keys, st.tuples(_dtypes, _shapes), min_size=1, max_size=6), st.integers(40, 400))
def test_any_state_dict_survives_export_and_agrees_with_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    limit: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensors: dict[str, Tensor] = {
        key: torch.randint(0, 2, shape).to(dtype) for key, (dtype, shape) in described.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entries = read_header(folder / "model.safetensors")
    assert {key: (entry.dtype, entry.shape) for key, entry in entries.items()} == {
        key: (NAME_OF[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()
    }
    export(folder, folder / "one")
    assert (folder / "one/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    export(folder, folder / "many", max_shard_size=limit)
    again = {key: load_file(entry.file)[key] for key, entry in inspect_pretrained(folder / "many").items()}
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensor) and again[key].dtype == tensor.dtype for key, tensor in tensors.items())
