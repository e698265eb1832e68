"""Group E: export to safetensors, from real ranks."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from meshtrain.errors import ContractError
from meshtrain.parallel import ParallelPlan, cross_entropy, replicate
from meshtrain.state import load_pretrained, save_pretrained
from tests.cases.models import (
    LM,
    LM_PLAN,
    MLP,
    MLP_PLAN,
    assert_same,
    gather,
    of_plain,
    plain,
    sharded,
    share,
    tokens,
    value_of,
    vectors,
    whole,
)

MESHES = [(4, 1), (2, 2), (1, 4)]


def files_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# E1


def lone_call(path: Path, caller: int) -> float:
    model = sharded(MLP, MLP_PLAN, 2, 2)
    start = time.monotonic()
    if dist.get_rank() == caller:
        absent = ", ".join(str(rank) for rank in range(4) if rank != caller)
        with pytest.raises(
            ContractError, match=rf"called on rank {caller}, but after 1 s not on rank\(s\) {absent} of 4.*if rank == 0"
        ):
            save_pretrained(model, path, join_seconds=1.0)
    seconds = time.monotonic() - start
    dist.barrier()
    assert not path.exists()
    save_pretrained(model, path)  # and all of them together still can
    return seconds


@pytest.mark.parametrize("caller", [0, 2])
def test_case_e1_a_lone_call_ends_in_an_error(ranks, tmp_path, caller):
    assert max(ranks(4).run(lone_call, tmp_path / "out", caller)) < 20
    assert_same(files_of(tmp_path / "out"), of_plain(plain(MLP), value_of), 0.0)


# E2


def export(dp: int, tp: int, path: Path) -> None:
    model = sharded(LM, LM_PLAN, dp, tp, torch.float32)
    if tp > 1:
        with pytest.raises(Exception, match="storage|data pointer|data_ptr"):
            save_file(model.state_dict(), path.parent / f"naive-{dist.get_rank()}.safetensors")
    save_pretrained(model, path)


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_e2_full_tensors_under_the_keys_of_the_plain_model(ranks, tmp_path, dp, tp):
    ranks(4).run(export, dp, tp, tmp_path / "out")
    reference = plain(LM, torch.float32)
    assert_same(files_of(tmp_path / "out"), of_plain(reference, value_of), 0.0)
    reference.load_state_dict(files_of(tmp_path / "out"), strict=True)


def read_back(dp: int, tp: int, path: Path) -> None:
    model = sharded(LM, LM_PLAN, dp, tp, torch.float32, seed=99)
    load_pretrained(model, path)
    assert_same(whole(model, value_of), of_plain(plain(LM, torch.float32), value_of), 0.0)


def test_case_e2_and_every_mesh_reads_them(ranks, tmp_path):
    ranks(4).run(export, 2, 2, tmp_path / "out")
    for dp, tp in MESHES:
        ranks(4).run(read_back, dp, tp, tmp_path / "out")


def save_and_load_replicas(path: Path) -> None:
    """C1: a save keeps one replica only, so drift must be found, not healed by a resume."""
    model = sharded(MLP, MLP_PLAN, 2, 2)
    save_pretrained(model, path)
    again = sharded(MLP, MLP_PLAN, 2, 2, seed=8)
    load_pretrained(again, path)
    assert_same(whole(again, value_of), whole(model, value_of), 0.0)


def test_case_c1_saved_and_loaded_weights_are_equal_on_all_ranks(ranks, tmp_path):
    ranks(4).run(save_and_load_replicas, tmp_path / "out")


# E4


class Configured(LM):
    """A language model whose config says something about ties."""

    def __init__(self, *, tied: bool, flag: bool) -> None:
        super().__init__(tied=tied)
        self.config = {"model_type": "tiny", "tie_word_embeddings": flag}


def make_configured(tied: bool, flag: bool):
    return lambda: Configured(tied=tied, flag=flag)


def export_ties(tied: bool, flag: bool, path: Path) -> None:
    model = sharded(make_configured(tied, flag), LM_PLAN, 2, 2)
    ids, labels = tokens()
    cross_entropy(model(share(ids, 2, 2)), share(labels, 2, 2)).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()
    logits = model(ids).full_tensor().detach()
    save_pretrained(model, path)
    # Reload as a tool does that believes the flag.
    config = json.loads((path / "config.json").read_text())
    reloaded = plain(make_configured(config["tie_word_embeddings"], config["tie_word_embeddings"]))
    load_pretrained(reloaded, path)
    assert torch.allclose(reloaded(ids), logits, rtol=0, atol=1e-11)
    assert config["tie_word_embeddings"] == (tied and flag)
    assert config["model_type"] == "tiny"


@pytest.mark.parametrize(("tied", "flag"), [(False, True), (False, False), (True, True), (True, False)])
def test_case_e4_the_flag_says_what_the_tensors_are(ranks, tmp_path, tied, flag):
    ranks(4).run(export_ties, tied, flag, tmp_path / "out")


# E5


def export_in_parts(path: Path) -> str:
    model = sharded(LM, LM_PLAN, 2, 2, torch.float32)
    if dist.get_rank() in (1, 2):
        model.layers[0].requires_grad_(False)
    save_pretrained(model, path, max_shard_size=3000)
    return (path / "model.safetensors.index.json").read_text()


def test_case_e5_one_map_of_keys_to_files(ranks, tmp_path):
    path = tmp_path / "out"
    (index,) = set(ranks(4).run(export_in_parts, path))
    index = json.loads(index)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(re.fullmatch(rf"model-0000\d-of-{len(files):05}\.safetensors", name) for name in files)
    assert sorted(set(index["weight_map"].values())) == files
    for name in files:
        assert sorted(load_file(path / name)) == sorted(k for k, file in index["weight_map"].items() if file == name)
    reference = of_plain(plain(LM, torch.float32), value_of)
    assert set(index["weight_map"]) == set(reference)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in reference.values())


# E7


class Ones(MLP):
    """Every norm weight is one, everywhere: equal values say nothing about how a tensor is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(7))
        self.up.weight.data.fill_(1.0)

    def reset_buffers(self) -> None:
        self.steps = torch.tensor(7)


def export_ones(dp: int, tp: int, path: Path) -> None:
    model = sharded(Ones, MLP_PLAN, dp, tp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(1.0)
    save_pretrained(model, path)
    model.steps += 1
    load_pretrained(model, path)
    assert int(model.steps) == 7


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_e7_equal_values_do_not_decide_how_a_tensor_is_joined(ranks, tmp_path, dp, tp):
    ranks(4).run(export_ones, dp, tp, tmp_path / "out")
    found = files_of(tmp_path / "out")
    wanted = Ones().state_dict()
    assert {name: tuple(t.shape) for name, t in found.items()} == {name: tuple(t.shape) for name, t in wanted.items()}
    assert found["steps"].shape == ()
    assert found["steps"] == 7
    assert all((t == 1).all() for name, t in found.items() if name != "steps")


# E9


class Wide(nn.Module):
    """64 tensors of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(64))


WIDE_PLAN = ParallelPlan({"layers.*": replicate()})


def resident() -> int:
    """Bytes of this process's own memory (what it maps of files is not its own)."""
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024


def growth_of_export(path: Path) -> int:
    model = sharded(Wide, WIDE_PLAN, 4, 1, torch.float32)
    save_pretrained(sharded(MLP, MLP_PLAN, 2, 2), path / "small")  # what a first call allocates for good
    before = peak = resident()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    thread = threading.Thread(target=sample)
    thread.start()
    save_pretrained(model, path / "large", max_shard_size="8MB")
    done.set()
    thread.join()
    return peak - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_case_e9_an_export_holds_one_buffer_not_the_model(ranks, tmp_path):
    growth = ranks(4).run(growth_of_export, tmp_path, timeout=100)
    assert max(growth) < 32 * 2**20, f"the model is 64 MiB, the buffer 16; ranks grew by {growth}"
    assert sum(t.nbytes for t in files_of(tmp_path / "large").values()) == 64 * 2**20


# E10


def frozen_norm(path: Path, ignore: bool) -> None:
    model = sharded(MLP, MLP_PLAN, 2, 2, torch.float32)
    model.norm.requires_grad_(False)
    model(share(vectors(8, 8, dtype=torch.float32), 2, 2)).sum().backward()
    save_pretrained(model, path)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=ignore)
    names = set(get_model_state_dict(model, options=options))
    assert names == (
        {name for name, p in model.named_parameters() if p.requires_grad or not ignore}
        if dist.get_rank() == 0
        else set()
    )
    assert gather(dist.get_rank()) == [0, 1, 2, 3], "the ranks are still in step"


@pytest.mark.parametrize("ignore", [False, True])
def test_case_e10_frozen_parameters_are_exported(ranks, tmp_path, ignore):
    ranks(4).run(frozen_norm, tmp_path / "out", ignore)
    assert_same(files_of(tmp_path / "out"), of_plain(plain(MLP, torch.float32), value_of), 0.0)
