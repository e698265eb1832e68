"""Llama settings that are refused, and with which words: the thing, the value and the way out."""

import dataclasses
from typing import Any

import pytest

from meshtrain.errors import Refused
from meshtrain.models.llama_config import PRESETS, LlamaConfig, RopeScaling

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

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "mistral"}, ["model_type", "'mistral'", "own model"]),
    ({"model_type": None}, ["model_type", "None", "'llama'"]),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        ["architectures", "LlamaForSequenceClassification", "LlamaForCausalLM"],
    ),
    ({"vocab_size": None}, ["vocab_size is missing", "Add vocab_size"]),
    ({"num_hidden_layers": None}, ["num_hidden_layers is missing"]),
    ({"vocab_size": "64"}, ["vocab_size", "'64'", "positive whole number"]),
    ({"hidden_size": True}, ["hidden_size", "True", "positive whole number"]),
    ({"hidden_size": 32.0}, ["hidden_size", "32.0", "positive whole number"]),
    ({"intermediate_size": -48}, ["intermediate_size", "-48", "positive whole number"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", "positive whole number"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads", "0", "positive whole number"]),
    ({"max_position_embeddings": [1]}, ["max_position_embeddings", "[1]"]),
    ({"vocab_size": 10**12}, ["vocab_size", "1000000000000", "below 2**31"]),
    ({"initializer_range": 2.0}, ["initializer_range", "2.0", "at most 1"]),
    ({"rope_theta": 10**400}, ["rope_theta", "finite number"]),
    ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'", "finite number"]),
    ({"rms_norm_eps": 0}, ["rms_norm_eps", "0", "finite number"]),
    ({"initializer_range": float("nan")}, ["initializer_range", "nan", "finite number"]),
    ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1", "true or false"]),
    ({"attention_bias": "no"}, ["attention_bias", "'no'", "true or false"]),
    ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'", "token id"]),
    ({"eos_token_id": [1, True]}, ["eos_token_id", "[1, True]", "token id"]),
    ({"bos_token_id": [1]}, ["bos_token_id", "[1]", "token id"]),
    ({"pad_token_id": -2}, ["pad_token_id", "-2", "token id"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads", "4", "num_key_value_heads (3)"]),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size", "32", "num_attention_heads (5)"]),
    ({"head_dim": 7}, ["head_dim", "7", "even", "Set an even head_dim"]),
    ({"hidden_size": 36}, ["head_dim", "9", "even"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
    ({"pretraining_tp": 2}, ["pretraining_tp", "2", "Set it to 1"]),
    ({"attention_dropout": 0.1}, ["attention_dropout", "0.1", "Set it to 0.0"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config", "bits", "dequantize"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "whole heads"]),
    ({"rope_theta": -1}, ["rope_theta", "-1", "above 0"]),
    ({"rope_scaling": "llama3"}, ["rope_scaling", "'llama3'", "object"]),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ["rope_type", "'yarn'", "linear, llama3"],
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_type", "'dynamic'", "Use another model"]),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "rope_type": ["x"]}},
        ["rope_type", "['x']"],
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "None", "'linear'"]),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": True}}, ["low_freq_factor", "True", "'llama3'"]),
    (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        ["high_freq_factor", "1.0", "above low_freq_factor"],
    ),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16.5}},
        ["original_max_position_embeddings", "16.5"],
    ),
    (
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "rope_scaling": LLAMA3,
        },
        ["rope_parameters", "rope_scaling", "Keep one"],
    ),
    (
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
        ["original_max_position_embeddings", "32", "16", "Keep one"],
    ),
]


@pytest.mark.parametrize("change, words", BAD, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_bad_settings_are_refused_with_the_thing_the_value_and_the_way_out(
    change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(Refused) as error:
        LlamaConfig.from_hf({**GOOD, **change}, source="my/config.json")
    message = str(error.value)
    assert message.startswith("my/config.json: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    "change, word",
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": LLAMA3}, "RopeScaling"),
    ],
)
def test_a_config_made_in_code_is_checked_too(change: dict[str, Any], word: str) -> None:
    with pytest.raises(Refused, match=word):
        dataclasses.replace(PRESETS["debug"], **change)


@pytest.mark.parametrize(
    "values",
    [
        ("yarn", 2.0),
        ("default", 2.0),
        ("linear", 0.0),
        ("linear", 2.0, 1.0),
        ("llama3", 8.0),
        ("llama3", 8.0, 4.0, 1.0, 16),
    ],
)
def test_a_scaling_made_in_code_is_checked_too(values: tuple[Any, ...]) -> None:
    with pytest.raises(Refused, match="RopeScaling"):
        RopeScaling(*values)
