"""Checkpoints of torch become Hugging Face directories with the same logits; hostile ones are refused and run nothing."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from meshtrain.convert import importing, worker
from meshtrain.convert.choose import choose, left_out
from meshtrain.convert.dcp import load_tensor, read_metadata
from meshtrain.convert.importing import import_model
from meshtrain.convert.key_map import KeyMap, Target, read_key_map
from meshtrain.convert.llama import llama_key_map, llama_shapes
from meshtrain.convert.reader import Listed, Reader
from meshtrain.errors import MeshtrainError, Refused
from meshtrain.models.llama import Llama
from meshtrain.models.llama_config import PRESETS, LlamaConfig, RopeScaling
from meshtrain.state import inspect_pretrained
from tests.ranks import mesh

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    rope_theta=100.0, rms_norm_eps=1e-5, initializer_range=0.3,
)  # fmt: skip
IDS = torch.arange(2 * 9).view(2, 9) * 7 % 61


def titan_state(seed: int = 0) -> dict[str, Tensor]:
    """Random weights under torchtitan's (and Meta's) names."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    c, kv = CONFIG, CONFIG.num_key_value_heads * CONFIG.head_dim
    state = {"tok_embeddings.weight": made(c.vocab_size, c.hidden_size)}
    for number in range(c.num_hidden_layers):
        at = f"layers.{number}."
        for name, rows in (("wq", c.hidden_size), ("wk", kv), ("wv", kv), ("wo", c.hidden_size)):
            state[f"{at}attention.{name}.weight"] = made(rows, c.hidden_size)
        state[f"{at}feed_forward.w1.weight"] = made(c.intermediate_size, c.hidden_size)
        state[f"{at}feed_forward.w2.weight"] = made(c.hidden_size, c.intermediate_size)
        state[f"{at}feed_forward.w3.weight"] = made(c.intermediate_size, c.hidden_size)
        state[f"{at}attention_norm.weight"] = 1 + made(c.hidden_size)
        state[f"{at}ffn_norm.weight"] = 1 + made(c.hidden_size)
    state["norm.weight"] = 1 + made(c.hidden_size)
    state["output.weight"] = made(c.vocab_size, c.hidden_size)
    return state


def titan_logits(state: dict[str, Tensor]) -> Tensor:
    """What a model with these weights computes that rotates neighbouring elements, as complex numbers."""
    c = CONFIG
    frequencies = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
    turn = torch.polar(torch.ones(()), torch.outer(torch.arange(IDS.shape[1]), frequencies))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (c.hidden_size,), state[name], c.rms_norm_eps)

    def rotated(x: Tensor) -> Tensor:
        return torch.view_as_real(
            torch.view_as_complex(rearrange(x, "... (pair two) -> ... pair two", two=2).contiguous()) * turn
        ).flatten(-2)

    x = state["tok_embeddings.weight"][IDS]
    for number in range(c.num_hidden_layers):
        at = f"layers.{number}."
        h = norm(x, f"{at}attention_norm.weight")
        q, k, v = (
            rearrange(h @ state[f"{at}attention.{name}.weight"].T, "b s (h d) -> b h s d", d=c.head_dim)
            for name in ("wq", "wk", "wv")
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + rearrange(mixed, "b h s d -> b s (h d)") @ state[f"{at}attention.wo.weight"].T
        h = norm(x, f"{at}ffn_norm.weight")
        gate = F.silu(h @ state[f"{at}feed_forward.w1.weight"].T)
        x = x + (gate * (h @ state[f"{at}feed_forward.w3.weight"].T)) @ state[f"{at}feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ state["output.weight"].T


def in_2026(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchtitan's newer names."""
    return {
        key.replace("attention.w", "attention.qkv_linear.w") if ".wo." not in key else key: tensor
        for key, tensor in ((key.replace("output.weight", "lm_head.weight"), tensor) for key, tensor in state.items())
    }


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchtitan's fused query, key and value: each KV head's queries, then its key, then its value."""
    result = dict(state)
    group = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    for number in range(CONFIG.num_hidden_layers):
        at = f"layers.{number}.attention."
        q, k, v = (result.pop(f"{at}{name}.weight") for name in ("wq", "wk", "wv"))
        parts = [
            rearrange(part, "(kv slot d) dim -> kv slot d dim", kv=CONFIG.num_key_value_heads, slot=slot)
            for part, slot in ((q, group), (k, 1), (v, 1))
        ]
        result[f"{at}qkv_linear.wqkv.weight"] = torch.cat(parts, 1).flatten(0, 2)
    return result


TUNE = {
    "attention.wq.weight": "attn.q_proj.weight", "attention.wk.weight": "attn.k_proj.weight", "attention.wv.weight": "attn.v_proj.weight",
    "attention.wo.weight": "attn.output_proj.weight", "feed_forward.w1.weight": "mlp.w1.weight", "feed_forward.w2.weight": "mlp.w2.weight",
    "feed_forward.w3.weight": "mlp.w3.weight", "attention_norm.weight": "sa_norm.scale", "ffn_norm.weight": "mlp_norm.scale",
}  # fmt: skip


def in_torchtune(state: dict[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for key, tensor in state.items():
        head, _, rest = key.partition(".")
        number, _, tail = rest.partition(".")
        result[f"layers.{number}.{TUNE[tail]}" if head == "layers" else key.replace("norm.weight", "norm.scale")] = (
            tensor
        )
    return result


def config_file(folder: Path, config: LlamaConfig = CONFIG) -> Path:
    path = folder / "the-config.json"
    path.write_text(json.dumps(config.to_hf()))
    return path


def hf_logits(path: Path) -> Tensor:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    with torch.no_grad():
        return model.eval()(IDS).logits


class Here:
    """A Reader without its subprocess, whose start takes seconds."""

    def __init__(self, kind: str, paths: list[Path]) -> None:
        self.stored, self.left_out = (worker.open_dcp if kind == "dcp" else worker.open_pt)(paths)
        self.tensors = {key: Listed(one.dtype, one.shape) for key, one in self.stored.items()}

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, key: str) -> None:
        self.rest = bytes(worker.plain(self.stored[key].load()).reshape(-1).view(torch.uint8).tolist())

    def fill(self, into: memoryview) -> None:
        into[:], self.rest = self.rest[: len(into)], self.rest[len(into) :]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "Reader", Here)


def save_dcp(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(
    ("kind", "naming", "table"),
    [
        ("dcp", dict, "llama-torchtitan"),
        ("pt", in_2026, "llama-torchtitan"),
        ("pt", fused, "llama-torchtitan"),
        ("dcp", in_torchtune, "llama-torchtune"),
    ],
    ids=["torchtitan", "torchtitan-2026", "torchtitan-fused", "torchtune"],
)
def test_imported_weights_give_the_logits_of_the_model_that_they_are_from(
    kind: Any, naming: Callable[[dict[str, Tensor]], dict[str, Tensor]], table: str, tmp_path: Path
) -> None:
    state = titan_state()
    source = tmp_path / "source"
    if kind == "dcp":
        training = {"step": torch.tensor(3), "optimizer": {"state": {"a": {"exp_avg": torch.ones(2)}}, "lr": 0.1}}
        save_dcp({"model": naming(state), **training}, source)
    else:
        source = tmp_path / "source.pt"
        torch.save(naming(state), source)
    done = import_model(
        source,
        tmp_path / "out",
        kind=kind,
        key_map=table,
        config=config_file(tmp_path),
        max_shard_size="20KB",
        allow_pickle=True,
    )
    assert len(list(done.path.glob("*.safetensors"))) > 2
    assert done.left_out == ({"optimizer": 1, "step": 1} if kind == "dcp" else {})
    torch.testing.assert_close(hf_logits(done.path), titan_logits(state), atol=2e-5, rtol=2e-5)


def test_the_order_of_rows_matters_to_this_model() -> None:
    """The check above would pass without the permutation if the rotation did nothing."""
    state = titan_state()
    turned = {key: llama_key_map("llama-torchtitan", CONFIG).places([key]) for key in state if ".wq." in key}
    swapped = {key: next(iter(places.values())).change(state[key]) for key, places in turned.items()}  # type: ignore[misc]
    assert (titan_logits({**state, **swapped}) - titan_logits(state)).abs().max() > 0.1


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), CONFIG, LlamaConfig(64, 32, 48, 1, 4, 2, head_dim=16, attention_bias=True, mlp_bias=True)],
    ids=lambda config: f"{config.hidden_size}",
)
def test_the_shapes_that_a_config_tells_are_those_of_the_model(config: LlamaConfig) -> None:
    with torch.device("meta"):
        model = Llama(config)
    expected = llama_shapes(config.to_hf(), "config.json")
    assert expected is not None
    kept = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {key: shape for key, (shape, needed) in expected.items() if needed} == kept
    assert expected["lm_head.weight"] == ((config.vocab_size, config.hidden_size), not config.tie_word_embeddings)
    assert llama_shapes({"model_type": "gpt2"}, "config.json") is None
    assert llama_shapes({**config.to_hf(), "architectures": ["LlamaForSequenceClassification"]}, "config.json") is None


def sharded(path: Path) -> None:
    """Saved from four ranks, in rectangles of uneven sizes."""
    grid = mesh(2, 2)
    tensors: dict[str, DTensor] = {}
    for name, shape in (("a.weight", (7, 5)), ("b.weight", (6, 4)), ("c", (9,))):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        placements = [Shard(0), Shard(1)] if len(shape) == 2 else [Shard(0), Shard(0)]
        tensors[name] = distribute_tensor(whole, grid, placements)
    dcp.save({"model": tensors, "n": torch.tensor(5)}, checkpoint_id=path)


def test_chunks_of_many_ranks_come_together(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(4).run(sharded, tmp_path / "source")
    monkeypatch.setattr(importing, "Reader", Here)
    assert len(list((tmp_path / "source").glob("*.distcp"))) == 4
    done = import_model(tmp_path / "source", tmp_path / "out", kind="dcp", dtype="fp64", allow_pickle=True)
    state = load_file(done.path / "model.safetensors")
    for name, shape in (("a.weight", (7, 5)), ("b.weight", (6, 4)), ("c", (9,))):
        assert torch.equal(state[name], torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape))
    assert not done.has_config


def odd_state() -> dict[str, Tensor]:
    base = torch.randn(6, 5)
    return {
        "plain": base.clone(),
        "transposed": base.T,
        "view": base[1:3],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": base.to(torch.bfloat16),
        "count": torch.tensor([2**40]),
        "mask": torch.tensor([True, False]),
        "eight": base.to(torch.float8_e4m3fn),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "größe": torch.ones(1),
        "_orig_mod.compiled.weight": torch.ones(2),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", "nested", "index"])
def test_every_kind_of_tensor_comes_through_from_files_of_torch_save(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "zip":
        monkeypatch.setattr(importing, "Reader", Here)
    state = odd_state()
    if form == "legacy":
        del state["eight"]  # torch cannot write it so
    source = tmp_path / "model.pth"
    if form == "index":
        source = tmp_path / "bins"
        source.mkdir()
        names, parts = list(state), ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
        for number, part in enumerate(parts):
            torch.save({name: state[name] for name in names[number::2]}, source / part)
        weight_map = {name: parts[position % 2] for position, name in enumerate(names)}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, source)
    else:
        torch.save(state, source, _use_new_zipfile_serialization=form == "zip")
    done = import_model(source, tmp_path / "out", kind="pt", allow_pickle=True)
    found = load_file(done.path / "model.safetensors")
    expected = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(
            found[key].double() if key == "eight" else found[key], tensor.double() if key == "eight" else tensor
        ), key
    assert done.left_out == ({"optimizer": 1} if form == "nested" else {})


@pytest.mark.parametrize("same", [True, False])
def test_a_head_is_tied_only_where_its_values_are_the_embeddings(same: bool, tmp_path: Path, here: None) -> None:
    state = titan_state()
    if same:
        state["output.weight"] = state["tok_embeddings.weight"]
    torch.save(state, tmp_path / "source.pt")
    config = LlamaConfig.from_hf({**CONFIG.to_hf(), "tie_word_embeddings": True})
    path = import_model(
        tmp_path / "source.pt",
        tmp_path / "out",
        kind="pt",
        key_map="llama-torchtitan",
        config=config_file(tmp_path, config),
        allow_pickle=True,
    ).path
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is same
    assert ("lm_head.weight" in inspect_pretrained(path)) is not same
    torch.testing.assert_close(hf_logits(path), titan_logits(state), atol=2e-5, rtol=2e-5)


def test_a_file_maps_keys_and_the_files_beside_the_weights_come_along(tmp_path: Path, here: None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"module.a.0.w": torch.ones(1), "module.a.1.w": torch.ones(2), "step": torch.ones(3)}, source / "x.ckpt")
    (source / "config.json").write_text(json.dumps({"model_type": "own", "dtype": "float32"}))
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (source / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "map.json").write_text(json.dumps({"module.a.*.w": "blocks.*.weight", "step": None}))
    out = import_model(
        source, tmp_path / "out", kind="pt", key_map=str(tmp_path / "map.json"), dtype="bf16", allow_pickle=True
    ).path
    assert {key: entry.shape for key, entry in inspect_pretrained(out).items()} == {
        "blocks.0.weight": (1,),
        "blocks.1.weight": (2,),
    }
    assert json.loads((out / "config.json").read_text()) == {"model_type": "own", "dtype": "bfloat16"}
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert (out / "vocab.txt").read_text() == "a\nb\n"


# Hostile checkpoints.


class Attack:
    """Unpickled by an ordinary reader, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def in_metadata(folder: Path, attack: Attack) -> None:
    save_dcp({"model": {"w": torch.ones(3)}}, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(attack))


def within_metadata(folder: Path, attack: Attack) -> None:
    save_dcp({"model": {"w": torch.ones(3)}}, folder)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data["more"] = attack
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_chunk(folder: Path, attack: Attack) -> None:
    save_dcp({"model": {"w": torch.ones(3)}}, folder)
    chunk = folder / "__0_0.distcp"
    size = chunk.stat().st_size
    torch.save(attack, chunk)
    chunk.write_bytes(chunk.read_bytes()[:size].ljust(size, b"\0"))
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    torch.save({"w": torch.ones(3), "attack": attack}, chunk)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, chunk.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_zip(folder: Path, attack: Attack) -> None:
    folder.mkdir()
    torch.save({"w": torch.ones(3), "more": attack}, folder / "pytorch_model.bin")


def in_legacy(folder: Path, attack: Attack) -> None:
    folder.mkdir()
    torch.save({"w": attack}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def bare(folder: Path, attack: Attack) -> None:
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(attack, protocol=2))


def whole_module(folder: Path, attack: Attack) -> None:
    folder.mkdir()
    torch.save(torch.nn.Linear(2, 2), folder / "pytorch_model.bin")


ATTACKS = [in_metadata, within_metadata, in_chunk, in_zip, in_legacy, bare, whole_module]


def opened(folder: Path) -> None:
    """What the subprocess does, here and without what it gives up: the unpicklers alone must hold."""
    if (folder / ".metadata").exists():
        stored, _ = worker.open_dcp([folder])
    else:
        stored, _ = worker.open_pt([folder / "pytorch_model.bin"])
    for one in stored.values():
        one.load()


def careless(folder: Path) -> None:
    for name in (".metadata", "pytorch_model.bin", "__0_0.distcp"):
        if (folder / name).exists():
            for load in (
                lambda file: pickle.loads(file.read_bytes()),
                lambda file: torch.load(file, weights_only=False),
            ):
                with contextlib.suppress(Exception):
                    load(folder / name)


@pytest.mark.parametrize("make", ATTACKS, ids=lambda make: make.__name__)
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(
    make: Callable[[Path, Attack], None], tmp_path: Path
) -> None:
    attack = Attack(tmp_path / "mark")
    make(tmp_path / "source", attack)
    with pytest.raises((Refused, pickle.UnpicklingError)) as caught:
        opened(tmp_path / "source")
    assert "system" in str(caught.value) or make in (bare, whole_module)
    assert not attack.mark.exists()
    if make is not whole_module:  # the attack is one: an ordinary reader falls for it
        careless(tmp_path / "source")
        assert attack.mark.exists()


@pytest.mark.parametrize("make", [in_metadata, in_chunk, in_zip], ids=lambda make: make.__name__)
def test_an_import_of_such_a_pickle_fails_and_leaves_nothing(
    make: Callable[[Path, Attack], None], tmp_path: Path
) -> None:
    attack = Attack(tmp_path / "mark")
    make(tmp_path / "source", attack)
    kind: Any = "dcp" if make in (in_metadata, in_chunk) else "pt"
    with pytest.raises(Refused, match="system"):
        import_model(tmp_path / "source", tmp_path / "out", kind=kind, allow_pickle=True)
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_nothing_is_opened_unless_pickles_are_allowed_by_name(tmp_path: Path) -> None:
    in_zip(tmp_path / "source", Attack(tmp_path / "mark"))
    for kind in ("pt", "dcp"):
        with pytest.raises(Refused, match=r"may run code .*--allow-pickle"):
            import_model(tmp_path / "source", tmp_path / "out", kind=kind)
    assert not (tmp_path / "mark").exists()


def unpickled_with(call: Callable[[], object]) -> str:
    """What becomes of a call that a pickle has managed to make in the subprocess."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        worker.lock_up()
        try:
            call()
            os.write(write, b"done")
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


def test_the_subprocess_starts_nothing_writes_nothing_and_connects_to_nothing(tmp_path: Path) -> None:
    import socket
    import subprocess

    mark = tmp_path / "mark"
    calls: list[Callable[[], object]] = [
        lambda: os.system(f"touch {mark}"),
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.fork(),
        lambda: subprocess.run(["true"]),
        lambda: mark.write_text("x"),
        lambda: mark.parent.rename(tmp_path.parent / "elsewhere"),
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: os.unlink(__file__),
    ]
    assert [unpickled_with(call) for call in calls] == ["PermissionError"] * len(calls)
    assert not mark.exists()
    assert unpickled_with(lambda: torch.ones(3).sum()) == "done"


def test_the_subprocess_sees_no_environment_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with Reader("pt", [tmp_path / "a.pt"]) as reader:
        environment = Path(f"/proc/{reader._process.pid}/environ").read_bytes()
        assert list(reader.tensors) == ["w"]
    assert b"hunter2" not in environment
    assert b"TORCH_FORCE" not in environment
    assert reader._process.poll() is not None


def test_nothing_but_the_subprocess_unpickles() -> None:
    """Whatever else came to unpickle would be reached without --allow-pickle."""
    source = Path(worker.__file__).resolve().parents[1]
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if any(
                name in ("pickle", "_pickle", "shelve", "marshal", "torch.load", "torch.jit.load") for name in names
            ):
                found.add(path.relative_to(source).as_posix())
    assert found == {"convert/dcp.py", "convert/worker.py"}


# Checkpoints that are no such thing, or do not fit.


def test_metadata_of_any_bytes_is_refused(tmp_path: Path) -> None:
    save_dcp({"model": {"w": torch.ones(3), "v": torch.ones(2, 2)}}, tmp_path / "good")
    good = (tmp_path / "good/.metadata").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for round_ in range(300):
        raw = bytearray(good)
        for _ in range(1 + round_ % 4):
            raw[int(torch.randint(len(raw), (1,), generator=generator))] = int(
                torch.randint(256, (1,), generator=generator)
            )
        (tmp_path / "good/.metadata").write_bytes(raw[: len(raw) - (round_ % 7) * 10])
        try:
            for described in read_metadata(tmp_path / "good").values():
                load_tensor(tmp_path / "good", described)
        except (Refused, pickle.UnpicklingError, RuntimeError, EOFError):
            pass


def rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    save_dcp({"model": {"w": torch.ones(4, 2)}}, folder)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret.distcp"


def too_small(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([5, 2])


def beyond(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([3, 2])


def twice(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks *= 2


def past_the_end(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).length = 10**15


def other_place(metadata: Any) -> None:
    info = next(iter(metadata.storage_data.values()))
    info.offset, info.length = 100, info.length - 100


def other_shape(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["model.w"]
    chunk.size = chunk.chunks[0].sizes = torch.Size([8])
    chunk.chunks[0].offsets = torch.Size([0])
    (index,) = metadata.storage_data
    metadata.storage_data = {type(index)(index.fqn, [0]): metadata.storage_data[index]}


def compressed(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


WRONG = {
    elsewhere: "no file of this directory", too_small: "do not cover", beyond: "beyond its size", twice: "do not cover",
    past_the_end: "ends before byte", other_place: "[Zz]ip|magic|Invalid|pickle", other_shape: "not the tensor", compressed: "without extensions",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_metadata_that_contradicts_its_files_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    rewritten(tmp_path / "source", change)
    with pytest.raises((Refused, RuntimeError, pickle.UnpicklingError), match=WRONG[change]):
        for described in read_metadata(tmp_path / "source").values():
            load_tensor(tmp_path / "source", described)


def test_a_link_out_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    save_dcp({"w": torch.ones(2)}, tmp_path / "source")
    (tmp_path / "source/__0_0.distcp").rename(tmp_path / "elsewhere.distcp")
    (tmp_path / "source/__0_0.distcp").symlink_to(tmp_path / "elsewhere.distcp")
    (described,) = read_metadata(tmp_path / "source").values()
    with pytest.raises(Refused, match="symbolic link"):
        load_tensor(tmp_path / "source", described)


def test_sources_that_are_none_are_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "__enter__", lambda self: pytest.fail("started"))
    (tmp_path / "run/step-20").mkdir(parents=True)
    (tmp_path / "run/step-20/.metadata").write_bytes(b"")
    (tmp_path / "two").mkdir()
    for name in ("a.pt", "b.pt"):
        (tmp_path / "two" / name).write_bytes(b"")
    (tmp_path / "index").mkdir()
    (tmp_path / "index/pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../etc/passwd.bin"}})
    )
    os.mkfifo(tmp_path / "fifo.pt")
    cases: list[tuple[str, Any, str]] = [
        ("run", "dcp", r"no \.metadata.*run/step-20"),
        ("nowhere", "dcp", r"no \.metadata"),
        ("nowhere.pt", "pt", "No such file"),
        ("two", "pt", r"'a\.pt', 'b\.pt': give the one"),
        ("run", "pt", "no file of torch.save"),
        ("index", "pt", "only plain names"),
        ("fifo.pt", "pt", "not a regular file"),
    ]
    for name, kind, message in cases:
        with pytest.raises(Refused, match=message):
            import_model(tmp_path / name, tmp_path / "out", kind=kind, allow_pickle=True)
    for options, message in [
        ({"key_map": "llama-torchtitan"}, "--config"),
        ({"key_map": "llama-torchtitna"}, "is no file and none of the ready-made"),
        ({"dtype": "int3"}, "int3"),
        ({"max_shard_size": "5 parsec"}, "parsec"),
        ({"config": tmp_path / "none.json"}, "none.json"),
    ]:
        with pytest.raises(Refused, match=message):
            import_model(tmp_path / "two/a.pt", tmp_path / "out", kind="pt", allow_pickle=True, **options)  # type: ignore[arg-type]


def test_a_model_of_another_config_is_refused_with_every_difference(tmp_path: Path, here: None) -> None:
    state = titan_state()
    state["layers.0.attention.extra.weight"] = torch.ones(1)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(Refused, match=r"no pattern fits 'layers\.0\.attention\.extra\.weight'.*null leaves"):
        import_model(
            tmp_path / "a.pt",
            tmp_path / "out",
            kind="pt",
            key_map="llama-torchtitan",
            config=config_file(tmp_path),
            allow_pickle=True,
        )
    del state["layers.0.attention.extra.weight"], state["norm.weight"]
    torch.save(state, tmp_path / "a.pt")
    other = LlamaConfig.from_hf({**CONFIG.to_hf(), "vocab_size": 60})
    with pytest.raises(
        Refused, match=r"model\.norm\.weight is missing.*embed_tokens\.weight has shape \[61, 48\] and not \[60, 48\]"
    ):
        import_model(
            tmp_path / "a.pt",
            tmp_path / "out",
            kind="pt",
            key_map="llama-torchtitan",
            config=config_file(tmp_path, other),
            allow_pickle=True,
        )
    heads = LlamaConfig.from_hf({**CONFIG.to_hf(), "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8})
    with pytest.raises(Refused, match=r"wq\.weight' has shape \[48, 48\], which does not fit the heads"):
        import_model(
            tmp_path / "a.pt",
            tmp_path / "out",
            kind="pt",
            key_map="llama-torchtitan",
            config=config_file(tmp_path, heads),
            allow_pickle=True,
        )
    assert not (tmp_path / "out").exists()


def test_an_index_is_held_against_its_files(tmp_path: Path, here: None) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "one.bin")
    torch.save({"b": torch.ones(1)}, tmp_path / "two.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin", "c": "two.bin"}}))
    with pytest.raises(Refused, match="lists 'c', which no file holds"):
        import_model(tmp_path, tmp_path / "out", kind="pt", allow_pickle=True)
    torch.save({"b": torch.ones(1), "a": torch.ones(2)}, tmp_path / "two.bin")
    with pytest.raises(Refused, match="holds 'a', which another file holds too"):
        import_model(tmp_path, tmp_path / "out", kind="pt", allow_pickle=True)
    torch.save({"b": torch.ones(1), "_orig_mod.b": torch.ones(2)}, tmp_path / "two.bin")
    with pytest.raises(Refused, match="are one key"):
        import_model(tmp_path / "two.bin", tmp_path / "out", kind="pt", allow_pickle=True)
    assert not (tmp_path / "out").exists()


def test_a_directory_in_the_way_is_not_replaced(tmp_path: Path, here: None) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    out = import_model(tmp_path / "a.pt", tmp_path / "out", kind="pt", allow_pickle=True).path
    with pytest.raises(Refused, match="--overwrite"):
        import_model(tmp_path / "a.pt", out, kind="pt", allow_pickle=True)
    import_model(tmp_path / "a.pt", out, kind="pt", allow_pickle=True, overwrite=True, dtype="bf16")
    assert load_file(out / "model.safetensors")["a"].dtype == torch.bfloat16


def test_key_maps_take_stars_over_and_refuse_what_is_ambiguous(tmp_path: Path) -> None:
    table = KeyMap({"a.*.b.*": (Target("x.*.*"),), "a.**": (Target("rest.**"),), "drop": ()}, "map")
    places = table.places(["a.1.b.2", "a.1.c.2", "drop"])
    assert {key: place.source for key, place in places.items()} == {"x.1.2": "a.1.b.2", "rest.1.c.2": "a.1.c.2"}
    with pytest.raises(Refused, match="no pattern fits 'b'"):
        table.places(["b"])
    with pytest.raises(Refused, match=r"'p\.1' and 'q\.1' both become 'z\.1'"):
        KeyMap({"p.*": (Target("z.*"),), "q.*": (Target("z.*"),)}, "map").places(["p.1", "q.1"])
    with pytest.raises(Refused, match="other stars"):
        KeyMap({"a.*": (Target("b"),)}, "map")
    with pytest.raises(Refused, match="before its end"):
        KeyMap({"**.a": (Target("**.b"),)}, "map")
    (tmp_path / "map.json").write_text('{"a": 3}')
    with pytest.raises(Refused, match=r"map\.json: 'a' becomes '3'"):
        read_key_map(tmp_path / "map.json")
    (tmp_path / "map.json").write_text('{"a+b": "c", "a.b": "d"}')
    assert set(read_key_map(tmp_path / "map.json").places(["a.b"])) == {"d"}
    with pytest.raises(Refused, match="no pattern fits 'aab'"):
        read_key_map(tmp_path / "map.json").places(["aab"])


def test_the_model_is_found_among_the_parts_of_a_checkpoint() -> None:
    assert choose([("a",), ("b",)], "x") == ()
    assert choose([("model", "a"), ("optimizer", "state", "a"), ("step",)], "x") == ("model",)
    assert choose([("app", "model", "a"), ("app", "optim", "a")], "x") == ("app", "model")
    assert choose([("weights", "a"), ("optim", "a")], "x") == ("weights",)
    assert left_out([("model", "a"), ("optim", "a"), ("optim", "b"), ("step",)], ("model",)) == {"optim": 2, "step": 1}
    for paths in ([("left", "a"), ("right", "a")], [("optim", "a")], []):
        with pytest.raises(Refused, match="Save the state dict alone"):
            choose(paths, "x")


def test_a_dict_that_holds_itself_ends(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": torch.ones(1)}
    loop["again"] = loop
    torch.save(loop, tmp_path / "a.pt")
    stored, left = worker.open_pt([tmp_path / "a.pt"])
    assert list(stored) == ["w"]
    assert left == {"again": 8}


def test_a_reader_that_dies_is_told_of(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with Reader("pt", [tmp_path / "a.pt"]) as reader:
        reader._process.kill()
        with pytest.raises(MeshtrainError, match="signal 9"):
            reader.begin("w")


def test_rope_scaling_of_the_config_is_kept(tmp_path: Path, here: None) -> None:
    config = LlamaConfig.from_hf({**CONFIG.to_hf(), "rope_scaling": RopeScaling("llama3", 8, 1, 4, 16).to_hf()})
    torch.save(titan_state(), tmp_path / "a.pt")
    path = import_model(
        tmp_path / "a.pt",
        tmp_path / "out",
        kind="pt",
        key_map="llama-torchtitan",
        config=config_file(tmp_path, config),
        allow_pickle=True,
    ).path
    assert LlamaConfig.from_pretrained_dir(path).rope_scaling == config.rope_scaling
