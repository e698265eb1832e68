"""The files beside the weights of a Hugging Face model: config, generation config, tokenizer; and what
ties mean for them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshtrain.errors import ContractError, Refused
from meshtrain.state.publish import TOKENIZER_FILES, write_file
from meshtrain.state.specs import TensorSpec, canonical


def hf_config(model: nn.Module) -> dict[str, Any] | None:
    """What config.json says of a model: `model.config` through its to_hf() or to_dict(), or a dict; None
    without one.
    """
    config = getattr(model, "config", None)
    if config is None:
        return None
    if isinstance(config, dict):
        return dict(config)
    for method in ("to_hf", "to_dict"):
        if callable(convert := getattr(config, method, None)):
            result = dict(convert())
            if method == "to_dict" and not result.get("architectures"):
                result["architectures"] = [_class_name(model)]
            return result
    raise ContractError(
        f"model.config is a {type(config).__name__}; config.json needs a dict, or an object with to_hf() or to_dict()"
    )


def hf_generation_config(model: nn.Module, given: Any) -> dict[str, Any] | None:
    """What generation_config.json says: `given`, or else the model's own; None without one."""
    config = given if given is not None else getattr(model, "generation_config", None)
    if config is None or isinstance(config, dict):
        return config
    for method in ("to_diff_dict", "to_dict"):
        if callable(convert := getattr(config, method, None)):
            return dict(convert())
    raise ContractError(f"generation_config is a {type(config).__name__}; give a dict, or an object with to_dict()")


def settle_keys(
    specs: Sequence[TensorSpec], config: dict[str, Any] | None, model: nn.Module
) -> tuple[list[TensorSpec], dict[str, Any] | None]:
    """Choose the keys of tied parameters, and make the config's tie flag say what the tensors are.

    A tied parameter is written once, under the name that transformers keeps. Tied embeddings in a model whose
    config says untied are written twice, as a reader that trusts the config expects. Embeddings that are two
    parameters in a model whose config says tied get their flag corrected, as the head would otherwise be lost
    on the next load.
    """
    kept = getattr(model, "_tied_weights_keys", None)
    keys: dict[str, str] = kept if isinstance(kept, dict) else {}
    result = []
    for spec in specs:
        key = keys.get(spec.name)
        result.append(dataclasses.replace(spec, key=key) if key in spec.names else spec)
    head = _head_name(model, specs)
    if config is None or head is None:
        return result, config
    position = next(i for i, spec in enumerate(result) if head in spec.names)
    spec = result[position]
    if len(spec.names) == 1:
        return result, with_tie_flag(config, False)
    if config.get("tie_word_embeddings") is False:
        twin = next(name for name in (head, *spec.names) if name != spec.key)
        return [*result[: position + 1], dataclasses.replace(spec, key=twin), *result[position + 1 :]], config
    return result, with_tie_flag(config, True)


def with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The config with its dtype set to what was written (under the names that it uses; else `torch_dtype`,
    which all versions read).
    """
    if dtype is None:
        return config
    name = str(dtype).removeprefix("torch.")
    used = [field for field in ("dtype", "torch_dtype") if field in config] or ["torch_dtype"]
    result = dict(config)
    for field in used:
        result[field] = name
    text = config.get("text_config")
    if isinstance(text, dict):
        used = [field for field in ("dtype", "torch_dtype") if text.get(field) is not None]
        result["text_config"] = {**text, **dict.fromkeys(used, name)}
    return result


def with_tie_flag(config: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The config with `tie_word_embeddings` set, also where a text model's settings are nested in it."""
    result = {**config, "tie_word_embeddings": tied}
    text = config.get("text_config")
    if isinstance(text, dict) and "tie_word_embeddings" in text:
        result["text_config"] = {**text, "tie_word_embeddings": tied}
    return result


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Put a tokenizer's files into a folder.

    tokenizer: a directory with tokenizer files, one such file, or an object of meshtrain, transformers or
    tokenizers.
    """
    if isinstance(tokenizer, str | Path):
        copy_tokenizer(Path(tokenizer), folder)
    elif callable(save := getattr(tokenizer, "save_pretrained", None)):
        save(str(folder))
    elif callable(text := getattr(tokenizer, "to_str", None)):
        write_file(folder / "tokenizer.json", text(pretty=True).encode())
    elif callable(save := getattr(tokenizer, "save", None)):
        save(folder)
    else:
        raise ContractError(
            f"tokenizer is a {type(tokenizer).__name__}; give a directory with tokenizer files, or an "
            f"object with "
            "save_pretrained(directory) or save(directory)"
        )


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of a directory, or one tokenizer file. Raises Refused when there is none."""
    files = [source / name for name in TOKENIZER_FILES] if source.is_dir() else [source]
    files = [file for file in files if file.is_file() and file.name in TOKENIZER_FILES]
    if not files:
        raise Refused(
            f"{source}: holds no tokenizer; give a directory with one of {', '.join(TOKENIZER_FILES[:4])}, or that file"
        )
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _head_name(model: nn.Module, specs: Sequence[TensorSpec]) -> str | None:
    """The name of the output head's weight among the tensors, where the model says or conventional naming
    shows it.
    """
    names = {name for spec in specs for name in spec.names}
    if callable(get := getattr(model, "get_output_embeddings", None)) and (head := get()) is not None:
        for path, module in model.named_modules():
            if module is head and canonical(f"{path}.weight") in names:
                return canonical(f"{path}.weight")
    heads = [name for name in names if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    return heads[0] if len(heads) == 1 else None


def _class_name(model: nn.Module) -> str:
    # fully_shard swaps the class for a subclass of (FSDPModule, the model's own) with a prefixed name.
    own = type(model)
    while own.__name__.startswith("FSDP") and len(own.__bases__) > 1:
        own = own.__bases__[1]
    return own.__name__
