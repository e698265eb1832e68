"""save_pretrained, load_pretrained and export with whole models: ours, transformers' and a plain module's."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import ContractError
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, parallelize
from meshtrain.state import export, load_pretrained, save_pretrained
from tests.ranks import mesh

TINY = LlamaConfig(
    vocab_size=57, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
IDS = torch.arange(2 * 8).view(2, 8) % 57


def llama(config: LlamaConfig, seed: int = 0) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    return initialise(model, seed=seed)  # type: ignore[return-value]


def hf_logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=dtype)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    with torch.no_grad():
        return model.eval()(IDS).logits


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS)


def saved_by_ranks(dp: int, tp: int, config: LlamaConfig, path: Path, dtype: str | None, limit: str) -> None:
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, mesh(dp, tp), parallel_plan())
    initialise(model, seed=0)
    save_pretrained(model, path, dtype=dtype, max_shard_size=limit, tokenizer=ByteTokenizer())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_the_export_is_the_same_bytes_from_every_mesh_and_opens_in_transformers(
    ranks: Any, tmp_path: Path, config: LlamaConfig
) -> None:
    model = llama(config)
    save_pretrained(model, tmp_path / "one", tokenizer=ByteTokenizer())
    for dp, tp in [(2, 2), (1, 4), (4, 1)]:
        ranks(4).run(saved_by_ranks, dp, tp, config, tmp_path / "many", None, "5GB")
        for name in sorted(os.listdir(tmp_path / "one")):
            assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
        assert sorted(os.listdir(tmp_path / "many")) == sorted(os.listdir(tmp_path / "one"))
    assert sorted(os.listdir(tmp_path / "one")) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    keys = load_file(tmp_path / "one/model.safetensors").keys()
    assert ("lm_head.weight" in keys) is not config.tie_word_embeddings
    torch.testing.assert_close(hf_logits(tmp_path / "many"), logits(model), atol=1e-5, rtol=1e-5)


@pytest.mark.timeout(120)
def test_sharded_bfloat16_export_says_so_in_its_config(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(saved_by_ranks, 2, 2, TINY, tmp_path / "out", "bfloat16", "10KB")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    expected = llama(TINY).bfloat16().float()
    torch.testing.assert_close(hf_logits(tmp_path / "out"), logits(expected), atol=1e-5, rtol=1e-5)


def loaded_by_ranks(dp: int, tp: int, config: LlamaConfig, path: Path) -> torch.Tensor:
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, mesh(dp, tp), parallel_plan(), loss_parallel=False)
    load_pretrained(model, path)
    return logits(model)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoints_of_transformers_load_on_any_mesh(
    ranks: Any, tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=57, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = hf_logits(tmp_path)
    ours = LlamaConfig.from_pretrained_dir(tmp_path)
    model = llama(ours, seed=5)
    load_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    for dp, tp in [(2, 2), (1, 4)]:
        for result in ranks(4).run(loaded_by_ranks, dp, tp, ours, tmp_path):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_a_model_of_transformers_is_saved_as_it_saves_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for model in (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=33)),
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=16,
                intermediate_size=20,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=33,
            )
        ),
    ):
        model.save_pretrained(tmp_path / "theirs")
        save_pretrained(model, tmp_path / "ours")
        theirs, ours = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
        configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours")]
        assert configs[0].items() <= configs[1].items()
        theirs_g, ours_g = (
            json.loads((tmp_path / who / "generation_config.json").read_text()) for who in ("theirs", "ours")
        )
        assert {k: v for k, v in ours_g.items() if v is not None} == {
            k: v for k, v in theirs_g.items() if v is not None
        }
        save_pretrained(model, tmp_path / "ours")
        for folder in ("theirs", "ours"):
            for file in (tmp_path / folder).iterdir():
                file.unlink()


def test_case_e4_a_trained_head_survives_a_config_that_says_tied(tmp_path: Path) -> None:
    model = llama(TINY)
    model.config = TIED
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert (hf_logits(tmp_path / "out", torch.float64) - logits(model.double())).abs().max() < 1e-6


def test_case_e4_tied_weights_survive_a_config_that_says_untied(tmp_path: Path) -> None:
    model = llama(TIED)
    model.config = TINY
    save_pretrained(model, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert (hf_logits(tmp_path / "out", torch.float64) - logits(model.double())).abs().max() < 1e-6
    load_pretrained(llama(TIED, seed=3), tmp_path / "out")


class Net(nn.Module):
    """No config, a 0-d parameter, persistent and other buffers, a tie between odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_a_plain_module_round_trips(tmp_path: Path) -> None:
    model, other = Net(), Net()
    path = save_pretrained(model, str(tmp_path / "a/out"))
    assert path == tmp_path / "a/out"
    assert os.listdir(path) == ["model.safetensors"]
    assert sorted(load_file(path / "model.safetensors")) == [
        "count",
        "one.bias",
        "one.weight",
        "scale",
        "two.bias",
    ]
    other.count.zero_()
    other.cache.zero_()
    load_pretrained(other, path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other.count == 4
    assert other.cache.sum() == 0
    assert other.two.weight is other.one.weight


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ContractError, match="weight: is on the meta device"):
        save_pretrained(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def sharded_by_hand(path: Path) -> str:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4), mesh=mesh(2, 1)["dp"])
    with pytest.raises(ContractError) as caught:
        save_pretrained(model, path)
    return str(caught.value)


@pytest.mark.timeout(60)
def test_case_e2_dtensors_that_meshtrain_did_not_make_are_refused_not_written_in_part(
    ranks: Any, tmp_path: Path
) -> None:
    assert all("not parallelized" in message for message in ranks(2).run(sharded_by_hand, tmp_path / "out"))
    assert os.listdir(tmp_path) == []


def saved_after_forward(path: Path) -> None:
    """Frozen norms, and FSDP keeps everything gathered after the forward pass."""
    with torch.device("meta"):
        model = Llama(TINY)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    parallelize(model, mesh(2, 2), parallel_plan(), reshard_after_forward=False)
    initialise(model, seed=0)
    logits(model)
    save_pretrained(model, path)


@pytest.mark.timeout(60)
def test_case_e10_frozen_and_gathered_parameters_are_saved_like_others(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(saved_after_forward, tmp_path / "out")
    save_pretrained(llama(TINY), tmp_path / "one")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()


def lone_call(path: Path) -> str:
    model = Llama(TINY)
    parallelize(model, mesh(1, 2), parallel_plan())
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(ContractError) as caught:
            save_pretrained(model, path, join_seconds=0.5)
        message = str(caught.value)
    dist.barrier()
    save_pretrained(model, path)
    return message


@pytest.mark.timeout(60)
def test_case_e1_save_pretrained_on_one_rank_says_that_it_is_collective(ranks: Any, tmp_path: Path) -> None:
    message = ranks(2).run(lone_call, tmp_path / "out")[0]
    assert "save_pretrained was called on rank 0" in message
    assert "collective" in message
    assert (tmp_path / "out/model.safetensors").exists()


def test_export_converts_reshards_and_brings_the_other_files_along(tmp_path: Path) -> None:
    model = llama(TIED)
    save_pretrained(model, tmp_path / "in", tokenizer=ByteTokenizer(), generation_config={"temperature": 0.5})
    (tmp_path / "in/training").mkdir()
    out = export(tmp_path / "in", tmp_path / "out", dtype="bf16", max_shard_size="10KB")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "in/tokenizer.json").read_bytes()
    assert not (out / "training").exists()
    expected = llama(TIED).bfloat16().float()
    torch.testing.assert_close(hf_logits(out), logits(expected), atol=1e-5, rtol=1e-5)
    again = export(out, tmp_path / "again")
    assert os.path.exists(again / "model.safetensors")


def test_export_corrects_a_config_that_says_tied_for_weights_that_are_not(tmp_path: Path) -> None:
    model = llama(TINY)
    save_pretrained(model, tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    out = export(tmp_path / "in", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    state = load_file(tmp_path / "in/model.safetensors")
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()},
        tmp_path / "in/model.safetensors",
    )
    out = export(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
