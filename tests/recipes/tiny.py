"""A model directory without weights, small enough for tests of the whole program."""

import json
from pathlib import Path

from meshtrain.models.llama_config import LlamaConfig


def config() -> LlamaConfig:
    """Two layers over the byte tokenizer's 320 ids."""
    return LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip


def write_config(folder: Path) -> str:
    """Write config.json into `folder`; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config().to_hf()))
    return str(path)


def flags(config: str | None, out: Path, **more: object) -> list[str]:
    """The command line of a run of a few cheap steps; without a config, the model is for --init-from to say."""
    chosen = {
        **({"model": config} if config else {}), "out": out, "steps": 4, "seq-len": 16, "global-batch": 8, "lr": 0.02, "sample": 4, "device": "cpu",
        "timeout": 60, **{name.replace("_", "-"): value for name, value in more.items()},
    }  # fmt: skip
    return [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
