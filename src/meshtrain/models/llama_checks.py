"""The rules for Llama settings, on plain values, each with its message. Not the config class."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from meshtrain.errors import Refused

ARCHITECTURE = "LlamaForCausalLM"
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITIVE_INTEGERS = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
POSITIVE_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")
BOOLEANS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# None asks for the value that follows from the other settings.
DERIVED = ("num_key_value_heads", "head_dim")
ROPE_TYPES = ("default", "linear", "llama3")


def refusal(where: str, key: str, value: object, rule: str, way_out: str = "") -> Refused:
    """The error for one bad value: where it stands, the key, the value, the rule and the way out."""
    return Refused(f"{where}: {key} is {value!r}, but {rule}. {way_out or f'Correct {key}.'}")


def kv_heads_of(values: Mapping[str, Any]) -> int:
    """num_key_value_heads, or what its absence means."""
    given = values.get("num_key_value_heads")
    return values["num_attention_heads"] if given is None else given


def head_dim_of(values: Mapping[str, Any]) -> int:
    """head_dim, or what its absence means."""
    given = values.get("head_dim")
    return values["hidden_size"] // values["num_attention_heads"] if given is None else given


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Refuses settings of a wrong type or range, and sizes that do not fit together."""
    rules: list[tuple[tuple[str, ...], Callable[[object], bool], str]] = [
        (POSITIVE_INTEGERS, _is_size, "it must be a positive whole number below 2**31"),
        (POSITIVE_NUMBERS, _is_positive, "it must be a finite number above 0"),
        (BOOLEANS, lambda v: isinstance(v, bool), "it must be true or false"),
    ]
    for names, accepts, rule in rules:
        for name in names:
            derived = name in DERIVED and values.get(name) is None
            if name in values and not derived and not accepts(values[name]):
                raise refusal(where, name, values[name], rule)
    for name in TOKENS:
        token = values.get(name)
        several = name == "eos_token_id" and isinstance(token, list | tuple) and len(token) > 0
        if token is not None and not all(_is_token(t) for t in (token if several else [token])):
            raise refusal(where, name, token, "it must be a token id (a whole number) or null")
    if values.get("initializer_range", 0.0) > 1:
        raise refusal(where, "initializer_range", values["initializer_range"], "transformers allows at most 1")
    hidden, heads, kv_heads = values["hidden_size"], values["num_attention_heads"], kv_heads_of(values)
    if hidden % heads:
        rule = f"it must be a multiple of num_attention_heads ({heads}), as transformers requires"
        raise refusal(where, "hidden_size", hidden, rule, "Change one of the two.")
    if heads % kv_heads:
        rule = f"it must be a multiple of num_key_value_heads ({kv_heads}), which share the query heads evenly"
        raise refusal(where, "num_attention_heads", heads, rule, "Change one of the two.")
    if head_dim_of(values) % 2:
        way_out = "Set an even head_dim, or change hidden_size or num_attention_heads."
        raise refusal(where, "head_dim", head_dim_of(values), "it must be even: RoPE rotates pairs", way_out)


def check_model_type(settings: Mapping[str, Any], where: str) -> None:
    """Refuses a config.json of another architecture."""
    way_out = f"Use the config.json of a {ARCHITECTURE} model, or bring your own model and plan."
    if settings.get("model_type") != "llama":
        raise refusal(where, "model_type", settings.get("model_type"), "only 'llama' can be built here", way_out)
    if settings.get("architectures") not in (None, [], [ARCHITECTURE]):
        raise refusal(where, "architectures", settings["architectures"], f"it must be [{ARCHITECTURE!r}]", way_out)


def check_features(settings: Mapping[str, Any], where: str) -> None:
    """Refuses what would change the computation and is not computed here, rather than ignoring it."""
    features: list[tuple[str, tuple[object, ...], str, str]] = [
        ("hidden_act", ("silu",), "only 'silu' (SwiGLU) is computed", "Use another model."),
        ("pretraining_tp", (None, 1), "sliced projections are not computed",
         "Set it to 1: the weights stay valid, results differ by rounding only."),
        ("attention_dropout", (None, 0), "attention has no dropout here", "Set it to 0.0."),
        ("partial_rotary_factor", (None, 1), "whole heads are rotated", "Use another model."),
        ("quantization_config", (None,), "quantized weights cannot be trained",
         "Use the unquantized model, or dequantize and save it with transformers first."),
    ]  # fmt: skip
    for key, accepted, rule, way_out in features:
        if key in settings and settings[key] not in accepted:
            raise refusal(where, key, settings[key], rule, way_out)


def parse_rope(settings: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from transformers 5's `rope_parameters`, or 4's `rope_theta` and `rope_scaling`."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        raw = settings.get(key)
        if raw is None:
            continue
        if not isinstance(raw, Mapping):
            raise refusal(where, key, raw, "it must be an object or null")
        # transformers takes the longest context where none is given; where two are, it is not consistent.
        name, outer = "original_max_position_embeddings", settings.get("original_max_position_embeddings")
        inner = raw.get(name, settings.get("max_position_embeddings") if outer is None else outer)
        if outer not in (None, inner):
            raise refusal(where, name, outer, f"{key} says {inner!r}", "Keep one of the two.")
        filled = {**raw, name: inner}
        theta = _theta(raw.get("rope_theta", settings.get("rope_theta")), where)
        found.append((theta, parse_scaling(filled, f"{where}: {key}")))
    if not found:
        return _theta(settings.get("rope_theta"), where), None
    if found[0] != found[-1]:
        rule = f"rope_scaling and rope_theta mean {found[1]}"
        raise refusal(where, "rope_parameters", settings["rope_parameters"], rule, "Keep one of the two forms.")
    return found[0]


def parse_scaling(raw: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The values of a RoPE object that its type uses, each checked; None for the default frequencies."""
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        rule = f"only {', '.join(ROPE_TYPES)} are computed"
        raise refusal(where, "rope_type", rope_type, rule, "Use another model.")
    check_features({key: raw[key] for key in ("partial_rotary_factor",) if key in raw}, where)
    if rope_type == "default":
        return None
    numbers = ("factor",) if rope_type == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for name in numbers:
        if not _is_positive(raw.get(name)):
            raise refusal(where, name, raw.get(name), f"rope_type {rope_type!r} needs a finite number above 0")
    values: dict[str, Any] = {"rope_type": rope_type, **{name: float(raw[name]) for name in numbers}}
    if rope_type == "llama3":
        original = raw.get("original_max_position_embeddings")
        if not _is_size(original):
            rule = "rope_type 'llama3' needs a positive whole number below 2**31"
            raise refusal(where, "original_max_position_embeddings", original, rule)
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            rule = f"it must be above low_freq_factor ({raw['low_freq_factor']!r})"
            raise refusal(where, "high_freq_factor", raw["high_freq_factor"], rule)
        values["original_max_position_embeddings"] = original
    return values


def _theta(value: object, where: str) -> float:
    if value is None:
        return 10000.0
    if not _is_positive(value):
        raise refusal(where, "rope_theta", value, "it must be a finite number above 0")
    return float(value)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> TypeGuard[int]:
    return _is_int(value) and 0 < value < 2**31


def _is_positive(value: object) -> TypeGuard[int | float]:
    # A bound instead of math.isfinite, which overflows on a huge whole number.
    return (_is_int(value) or isinstance(value, float)) and 0 < value < 1e300


def _is_token(value: object) -> bool:
    # -1 is how early Llama files spell "no token".
    return _is_int(value) and value >= -1
