"""The settings of a Llama 3.x model: published sizes, and `config.json` in and out. Not the model itself."""

import copy
import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.errors import Refused
from meshtrain.models import llama_checks as checks


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than those of the pre-training.

    "linear" divides every frequency by `factor`. "llama3" leaves wavelengths (in tokens) below
    `original_max_position_embeddings / high_freq_factor` as they are, divides the frequencies of those above
    `original_max_position_embeddings / low_freq_factor` by `factor`, and interpolates between.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if checks.parse_scaling(self.to_hf(), "RopeScaling") != self.to_hf():
            rule = "this type does not use all the values given"
            raise checks.refusal("RopeScaling", "rope_type", self.rope_type, rule, "Leave the others at None.")

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` object of config.json."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama 3.x model's settings, named as in Hugging Face's config.json. Raises Refused on bad values."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward block (its gate and up projections)."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # resolved below: attributes are always int
    """None becomes `num_attention_heads` (no grouping)."""
    head_dim: int = None  # type: ignore[assignment]
    """None becomes `hidden_size // num_attention_heads`."""
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding's matrix."""
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    """Standard deviation of the initial matrices."""
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of config.json that the model does not read; `to_hf` writes them back."""

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        checks.check_values(values, "LlamaConfig")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise checks.refusal("LlamaConfig", "rope_scaling", self.rope_scaling, "it must be a RopeScaling or None")
        # Resolved once here, so that nothing downstream has to know what None means.
        object.__setattr__(self, "num_key_value_heads", checks.kv_heads_of(values))
        object.__setattr__(self, "head_dim", checks.head_dim_of(values))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for name in checks.POSITIVE_NUMBERS:
            object.__setattr__(self, name, float(values[name]))

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], source: str = "config.json") -> "LlamaConfig":
        """The config that a `LlamaForCausalLM` config.json describes, in its transformers 4 or 5 form.

        Keys that the model does not read are kept in `extra`. Raises Refused, naming `source`, the key, the
        value, the rule and the way out, for another architecture, missing or bad values, or a feature that is
        not computed here.
        """
        if not isinstance(settings, Mapping):
            kind = type(settings).__name__
            raise Refused(
                f"{source}: holds a {kind}, but it must be a JSON object. "
                f"Use the config.json of a {checks.ARCHITECTURE} model."
            )
        checks.check_model_type(settings, source)
        checks.check_features(settings, source)
        for key in checks.REQUIRED:
            if settings.get(key) is None:
                needed = ", ".join(checks.REQUIRED)
                raise Refused(f"{source}: {key} is missing, but {checks.ARCHITECTURE} needs {needed}. Add {key}.")
        names = {f.name for f in dataclasses.fields(cls)} - _ROPE_KEYS - {"extra"}
        given = {name: settings[name] for name in names if name in settings}
        # A null means the default, except where None is itself a value.
        given = {name: value for name, value in given.items() if value is not None or name in checks.TOKENS}
        checks.check_values(given, source)
        theta, scaling = checks.parse_rope(settings, source)
        return cls(
            **given,
            rope_theta=theta,
            rope_scaling=RopeScaling(**scaling) if scaling else None,
            extra={
                key: copy.deepcopy(settings[key]) for key in settings if key not in names | _ROPE_KEYS | _FIXED.keys()
            },
        )

    @classmethod
    def from_pretrained_dir(cls, path: str | Path) -> "LlamaConfig":
        """The config of a model directory (its config.json), or of a config.json itself. Raises Refused."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or error
            raise Refused(
                f"{file}: cannot be read ({reason}), but a model directory needs a config.json. Check the path."
            ) from error
        except (ValueError, RecursionError) as error:
            raise Refused(f"{file}: is not JSON ({error}). Restore the file from the original model.") from error
        return cls.from_hf(settings, source=str(file))

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json: JSON values that transformers 4 and 5 read back as the same settings.

        RoPE is written as `rope_theta` and `rope_scaling`: version 5 reads that form too, while version 4
        would silently take the default frequencies from a file with only the newer `rope_parameters`.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        values["rope_scaling"] = self.rope_scaling.to_hf() if self.rope_scaling else None
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return {**copy.deepcopy(dict(self.extra)), **copy.deepcopy(_FIXED), **values}


_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
# What every file says: other values are refused on reading.
_FIXED: dict[str, Any] = {
    "architectures": [checks.ARCHITECTURE],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
}


def config_for(spec: str) -> LlamaConfig:
    """The config that `spec` names: a preset ("debug", "llama3.1-8b", "8B", in any case), a model directory,
    or a config.json.

    A preset's name wins over a directory of that name (write "./debug" for the directory). Raises Refused,
    with near matches, when it is none of these.
    """
    name = spec.strip().lower().removeprefix("meta-llama/").removeprefix("meta-").replace("llama-", "llama")
    name = _ALIASES.get(name, name)
    if name in PRESETS:
        return PRESETS[name]
    if os.path.exists(spec) or spec.endswith(".json"):
        return LlamaConfig.from_pretrained_dir(spec)
    near = difflib.get_close_matches(name, [*PRESETS, *_ALIASES], n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise Refused(
        f"model {spec!r}: no preset, directory or config.json has this name.{hint} "
        f"Use one of {', '.join(PRESETS)}, or the path of a model directory."
    )


def _llama3(factor: float, hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> LlamaConfig:
    """A published Llama 3.1 or 3.2 base model: what tells the sizes apart, and all that they share."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor, 1.0, 4.0, 8192),
        bos_token_id=128000,
        eos_token_id=128001,
        tie_word_embeddings=tied,
    )


PRESETS: dict[str, LlamaConfig] = {
    # A million parameters over bytes and one end-of-document token (256).
    "debug": LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=256,
    ),
    "llama3.2-1b": _llama3(factor=32, hidden=2048, intermediate=8192, layers=16, heads=32, tied=True),
    "llama3.2-3b": _llama3(factor=32, hidden=3072, intermediate=8192, layers=28, heads=24, tied=True),
    "llama3.1-8b": _llama3(factor=8, hidden=4096, intermediate=14336, layers=32, heads=32, tied=False),
    "llama3.1-70b": _llama3(factor=8, hidden=8192, intermediate=28672, layers=80, heads=64, tied=False),
    "llama3.1-405b": _llama3(factor=8, hidden=16384, intermediate=53248, layers=126, heads=128, tied=False),
}  # fmt: skip
"""Ready-made sizes. Those named after Llama have the settings of the base models' published config.json."""

_ALIASES = {name.split("-")[1]: name for name in PRESETS if "-" in name}
