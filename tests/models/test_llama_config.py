"""Llama settings: published sizes, config.json both ways, models found by name. Not the table of refusals."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.errors import Refused
from meshtrain.models.llama import Llama
from meshtrain.models.llama_config import PRESETS, LlamaConfig, config_for

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
COMPARED = [f.name for f in dataclasses.fields(LlamaConfig) if f.name not in ("rope_theta", "rope_scaling", "extra")]


@pytest.mark.parametrize(
    "name, count",
    [
        ("debug", 1_049_984),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == count
    assert name in PRESETS and len(PRESETS) == 6


@pytest.mark.parametrize(
    "spec, name",
    [
        ("debug", "debug"),
        ("DEBUG", "debug"),
        ("1b", "llama3.2-1b"),
        ("3B", "llama3.2-3b"),
        ("8B", "llama3.1-8b"),
        ("70b", "llama3.1-70b"),
        ("405B", "llama3.1-405b"),
        ("Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"),
    ],
)
def test_a_preset_is_found_by_its_names(spec: str, name: str) -> None:
    assert config_for(spec) is PRESETS[name]


def test_a_model_is_found_by_its_directory_or_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD))
    assert config_for(str(tmp_path)) == config_for(str(file)) == LlamaConfig.from_hf(GOOD)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("llama3.1-7b", ["llama3.1-7b", "Did you mean llama3.1-70b", "llama3.2-1b"]),
        ("no/such", ["no/such", "path of a model directory"]),
        ("gone.json", ["gone.json", "No such file", "Check the path"]),
    ],
)
def test_an_unknown_model_is_refused(spec: str, words: list[str]) -> None:
    with pytest.raises(Refused) as error:
        config_for(spec)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[1]", b"3"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Refused, match=re.escape(str(tmp_path / "config.json"))):
        LlamaConfig.from_pretrained_dir(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="config.json"):
        config_for(str(tmp_path))


def test_absent_settings_mean_what_they_mean_to_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        key: GOOD[key] for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    small["num_attention_heads"] = 4
    assert_same(LlamaConfig.from_hf(small), transformers.LlamaConfig(**small))


def assert_same(ours: LlamaConfig, theirs: Any) -> None:
    for name in COMPARED:
        value = getattr(ours, name)
        assert (list(value) if isinstance(value, tuple) else value) == getattr(theirs, name), name
    expected = {
        "rope_theta": ours.rope_theta,
        **(ours.rope_scaling.to_hf() if ours.rope_scaling else {"rope_type": "default"}),
    }
    assert {key: value for key, value in theirs.rope_parameters.items() if key != "type"} == expected


ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "new-form": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "max_position_embeddings": 128},
    "old-form": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 128},
    "old-spelling": {"rope_scaling": {"type": "linear", "factor": 2}},
    "both-forms": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "rope_parameters": {"rope_theta": 5e5, **LLAMA3},
    },
    "original-outside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    "original-absent": {
        "rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k},
        "max_position_embeddings": 64,
    },
    "default-named": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "everything": {
        "head_dim": 10,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": [3, 4],
        "pad_token_id": 5,
        "rope_theta": 999.0,
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_transformers_reads_the_same_settings_from_what_is_written(name: str, tmp_path: Path) -> None:
    """Three ways to the same settings: transformers on the original, and both readers on what was written."""
    transformers = pytest.importorskip("transformers")
    original = {**GOOD, **ROUND_TRIPS[name]}
    ours = LlamaConfig.from_hf(original)
    assert_same(ours, transformers.LlamaConfig(**json.loads(json.dumps(original))))
    (tmp_path / "config.json").write_text(json.dumps(ours.to_hf()))
    assert LlamaConfig.from_pretrained_dir(tmp_path) == ours
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is transformers.LlamaConfig
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_file_that_transformers_wrote_is_read(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**json.loads(json.dumps({**GOOD, **ROUND_TRIPS[name]})))
    theirs.save_pretrained(tmp_path)
    assert_same(LlamaConfig.from_pretrained_dir(tmp_path), theirs)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_file(name: str) -> None:
    assert LlamaConfig.from_hf(json.loads(json.dumps(PRESETS[name].to_hf()))) == PRESETS[name]


def test_unknown_keys_are_kept_and_not_shared() -> None:
    extra = {"torch_dtype": "bfloat16", "transformers_version": "4.45.0", "my_note": {"a": [1, None]}}
    source = {**GOOD, **extra}
    config = LlamaConfig.from_hf(source)
    source["my_note"]["a"].append(2)
    assert config.extra == {**extra, "my_note": {"a": [1, None]}}
    config.to_hf()["my_note"]["a"].append(3)
    written = config.to_hf()
    assert {key: written[key] for key in extra} == {**extra, "my_note": {"a": [1, None]}}
    assert LlamaConfig.from_hf(written) == config


def test_configs_can_be_compared_and_hashed() -> None:
    first, second = LlamaConfig.from_hf({**GOOD, "note": [1]}), LlamaConfig.from_hf({**GOOD, "note": [1]})
    assert first == second and hash(first) == hash(second) and first != LlamaConfig.from_hf(GOOD)
