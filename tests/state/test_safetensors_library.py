"""Files of ours and of the safetensors library are the same thing: each reads what the other has written, whatever it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshtrain.errors import Refused
from meshtrain.state import inspect_pretrained, load_pretrained, read_header, save_pretrained
from meshtrain.state.dtypes import NAME_OF
from meshtrain.state.header import TensorInfo, make_header
from meshtrain.state.verify_values import scan

_DTYPES = st.sampled_from(sorted(NAME_OF, key=str))
_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_TAKEN = {"__metadata__", "config", "generation_config", "_tied_weights_keys", "get_output_embeddings"}
"""Names that mean something: to the format, or as attributes of a model to save_pretrained."""
_SEGMENTS = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "S", "P", "M"), exclude_characters="./\\"),
    min_size=1,
    max_size=8,
).filter(lambda name: name.isprintable() and not hasattr(nn.Module(), name) and name not in _TAKEN)
_KEYS = st.lists(_SEGMENTS, min_size=1, max_size=3).map(tuple)
_STATES = st.dictionaries(_KEYS, st.tuples(_DTYPES, _SHAPES, st.booleans()), max_size=7)


class Tree(nn.Module):
    """Parameters and buffers under any names."""

    def __init__(self, tensors: dict[tuple[str, ...], tuple[Tensor, bool]]) -> None:
        super().__init__()
        for path, (tensor, is_parameter) in tensors.items():
            at: nn.Module = self
            for name in path[:-1]:
                if name not in at._modules:
                    at.add_module(name, nn.Module())
                at = at.get_submodule(name)
            if is_parameter:
                at.register_parameter(path[-1], nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
            else:
                at.register_buffer(path[-1], tensor)


def made(
    described: dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...], bool]],
) -> dict[tuple[str, ...], tuple[Tensor, bool]]:
    """Random bytes for each, so that NaN, infinities and negative zeros are among them. No path may go through a tensor."""
    result = {}
    for path, (dtype, shape, is_parameter) in described.items():
        if any(path[: len(other)] == other or other[: len(path)] == path for other in described if other != path):
            continue
        count = torch.Size(shape).numel()
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
        result[path] = (tensor.view(shape), is_parameter)
    return result


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)


def agree(
    folder: Path, described: dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...], bool]], limit: int
) -> None:
    tensors = made(described)
    state = {".".join(path): tensor for path, (tensor, _) in tensors.items()}
    # Ours, read by the library.
    save_pretrained(Tree(tensors), folder / "one")
    found = load_file(folder / "one/model.safetensors")
    assert found.keys() == state.keys()
    assert all(same(found[key], tensor) for key, tensor in state.items())
    with safe_open(folder / "one/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    # The same in shards.
    if state:
        save_pretrained(Tree(tensors), folder / "many", max_shard_size=limit)
        spread = {key: load_file(entry.file)[key] for key, entry in inspect_pretrained(folder / "many").items()}
        assert spread.keys() == state.keys()
        assert all(same(spread[key], tensor) for key, tensor in state.items())
    # The library's, read by us: the header, the values, and the bytes as they lie.
    save_file(state, folder / "theirs.safetensors", metadata={"format": "pt"})
    assert (folder / "theirs.safetensors").read_bytes() == (folder / "one/model.safetensors").read_bytes()
    entries = read_header(folder / "theirs.safetensors")
    assert {key: (entry.dtype, entry.shape) for key, entry in entries.items()} == {
        key: (NAME_OF[tensor.dtype], tuple(tensor.shape)) for key, tensor in state.items()
    }
    assert [one.key for one in scan(folder / "theirs.safetensors", entries)] == list(entries)
    empty = Tree({path: (torch.zeros_like(tensor), is_parameter) for path, (tensor, is_parameter) in tensors.items()})
    load_pretrained(empty, folder / "theirs.safetensors")
    assert all(same(empty.state_dict()[key], tensor) for key, tensor in state.items())


_SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
}


@settings(max_examples=100, **_SETTINGS)
@given(_STATES, st.integers(1, 300))
def test_any_state_dict_passes_between_us_and_the_library(
    tmp_path_factory: pytest.TempPathFactory, described: dict, limit: int
) -> None:
    agree(tmp_path_factory.mktemp("any"), described, limit)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000, **_SETTINGS)
@given(_STATES, st.integers(1, 300))
def test_a_thousand_state_dicts_pass_between_us_and_the_library(
    tmp_path_factory: pytest.TempPathFactory, described: dict, limit: int
) -> None:
    agree(tmp_path_factory.mktemp("any"), described, limit)


@pytest.mark.parametrize("name", ["__metadata__", "", "a\0b", "a\nb", "../x", "/etc/passwd"])
def test_a_name_that_would_make_an_unreadable_file_is_refused_before_it_is_written(name: str) -> None:
    with pytest.raises(Refused, match="cannot be written: .*Rename the parameter"):
        make_header([TensorInfo("good", "F32", (1,)), TensorInfo(name, "F32", (1,))])


def test_such_a_parameter_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="__metadata__"):
        save_pretrained(Tree({("__metadata__",): (torch.ones(1), True)}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
