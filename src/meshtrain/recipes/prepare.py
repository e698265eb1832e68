"""Everything that is checked, and every file that is found, before a rank starts. It writes nothing but the token cache.

`prepare` turns settings into a run that can start, or raises Refused with the thing, the value, the rule and the way out.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshtrain import ParallelPlan, Refused, load_plan, resolve
from meshtrain.data import (
    Tokenizer,
    check_batching,
    check_vocab_size,
    find_files,
    load_tokenizer,
    prepare_tokens,
)
from meshtrain.environment import environment
from meshtrain.mesh import check_timeout, check_world_size, pick_device
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import PRESETS, LlamaConfig, config_for
from meshtrain.parallel import Resolved
from meshtrain.recipes.resume import find_run
from meshtrain.recipes.settings import DataSettings, Settings
from meshtrain.state import check_against, inspect_pretrained
from meshtrain.state.dtypes import WEIGHTS
from meshtrain.state.folder import read_json
from meshtrain.state.publish import check_target
from meshtrain.train.metrics import METRICS, SETTINGS
from meshtrain.train.schedule import check_schedule


@dataclass(frozen=True)
class Run:
    """A run that passed every check."""

    settings: Settings
    name: str
    """Of the model, for people and for the directory of the run."""
    config: LlamaConfig
    plan: ParallelPlan
    parameters: int
    """In the whole model."""
    tokenizer: Tokenizer
    tokens: Path | None
    """The token file; None where the ranks, which somebody else started, make it."""
    generation: Mapping[str, Any]
    """The content of generation_config.json."""
    out: Path
    export: Path
    device: str
    """"cpu" or "cuda"."""
    finished: bool = False
    """Whether --out holds this very run, with nothing left to do."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Of the parameters."""
        return torch.float64 if self.settings.model.dtype == "fp64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Of the computation, where it is not that of the parameters."""
        return torch.bfloat16 if self.settings.model.dtype == "bf16" else None


def prepare(settings: Settings) -> Run:
    """Check the settings together and against all that they name, tokenise the data, and return the run.

    Where torchrun or Slurm started this process, the data is only found, not tokenised: see `report.agree`.

    Raises Refused.
    """
    # The ranks are forked from this process: threads that torch starts here would be missing there.
    torch.set_num_threads(1)
    mesh = settings.mesh
    device = pick_device(mesh.device)
    joined = environment()
    if joined is not None:
        check_world_size(mesh.dp, mesh.tp, joined.world_size)
    _check_numbers(settings)
    name, config = _model_of(settings)
    tokenizer = _tokenizer_of(settings)
    if config is PRESETS["debug"]:
        config = replace(config, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_id)
    check_vocab_size(tokenizer, config.vocab_size)
    if settings.data.seq_len > config.max_position_embeddings:
        raise Refused(
            f"--seq-len {settings.data.seq_len}: the model {name} has max_position_embeddings {config.max_position_embeddings}. "
            "Use shorter sequences, or a model for longer ones"
        )
    plan = load_plan(mesh.plan) if mesh.plan is not None else parallel_plan()
    resolved = resolve(
        plan,
        build(config, torch.float32, "meta"),
        (mesh.dp, mesh.tp),
        sequence_parallel=mesh.sequence_parallel,
        loss_parallel=mesh.loss_parallel,
    )
    if settings.model.init_from is not None:
        check_against(resolved.layouts, inspect_pretrained(settings.model.init_from))
    out, export = _targets_of(settings, name)
    found = find_run(settings, config, out, export)
    if found.state in ("new", "begun"):
        _check_unused(export, "--export" if settings.output.export is not None else "--out")
    _check_space(export, resolved, settings)
    find_files(settings.data.data)
    return Run(
        settings=settings,
        name=name,
        config=config,
        plan=plan,
        parameters=sum(layout.numel for layout in resolved.layouts),
        tokenizer=tokenizer,
        tokens=None if joined is not None else tokens_of(settings.data, tokenizer, progress=True),
        generation=_generation_of(settings, config),
        out=out,
        export=export,
        device=device,
        finished=found.state == "finished",
    )


def build(config: LlamaConfig, dtype: torch.dtype, device: str) -> Llama:
    """The model, with parameters of this dtype on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Llama(config)
    finally:
        torch.set_default_dtype(before)


def tokens_of(data: DataSettings, tokenizer: Tokenizer, *, progress: bool) -> Path:
    """Tokenise the data unless the cache has it, and return the token file. Raises Refused when it is too short."""
    tokens = prepare_tokens(data.data, tokenizer, progress=progress)
    check_batching(1, 1, None, tokens=len(tokens), seq_len=data.seq_len)
    return tokens.path


def _check_numbers(settings: Settings) -> None:
    mesh, data, training, output = settings.mesh, settings.data, settings.training, settings.output
    for flag, size in (("--dp", mesh.dp), ("--tp", mesh.tp)):
        if size < 1:
            raise Refused(f"{flag} is {size}: an axis of the mesh has 1 or more ranks. Leave the flag out for 1")
    for flag, number in (
        ("--seq-len", data.seq_len),
        ("--global-batch", data.global_batch),
        ("--micro-batch", data.micro_batch),
    ):
        if number is not None and number < 1:
            raise Refused(f"{flag} is {number}: it must be 1 or more. Correct it")
    check_batching(data.global_batch, mesh.dp, data.micro_batch)
    check_schedule(training.steps, training.warmup_steps, training.lr)
    if not training.max_norm > 0:
        raise Refused(f"--max-norm is {training.max_norm}: it must be above 0. Use inf to turn clipping off")
    if not 0 <= training.weight_decay < math.inf:
        raise Refused(f"--weight-decay is {training.weight_decay}: it must be 0 or more, and finite. Use 0 for none")
    if not 0 <= training.seed < 2**63:
        raise Refused(f"--seed is {training.seed}: it must be a whole number from 0 to 2**63 - 1. Choose another")
    try:
        check_timeout(mesh.timeout)
    except Refused as error:
        raise Refused(f"--timeout {mesh.timeout}: {error}") from None
    checkpoint = settings.checkpoint
    for flag, count in (
        ("--save-every", checkpoint.save_every),
        ("--keep", checkpoint.keep),
        ("--keep-every", checkpoint.keep_every),
        ("--max-restarts", checkpoint.max_restarts),
    ):
        if count < 0:
            raise Refused(f"{flag} is {count}: it must be 0 or more. --help says what 0 means")
    if not 0 <= checkpoint.save_minutes < math.inf:
        raise Refused(f"--save-minutes is {checkpoint.save_minutes}: it must be 0 or more, and finite. Use 0 for none")
    if checkpoint.elastic and not checkpoint.max_restarts:
        raise Refused(
            "--elastic: has an effect on restarts only, and --max-restarts is 0. Give --max-restarts, as in 10"
        )
    if output.sample < 0:
        raise Refused(f"--sample is {output.sample}: it must be 0 or more. Use 0 for no sample")


def _model_of(settings: Settings) -> tuple[str, LlamaConfig]:
    spec = settings.model.model
    if spec is None:
        source = settings.model.init_from
        if source is None:
            return "debug", config_for("debug")
        folder = Path(source)
        if not folder.is_dir():
            if folder.exists():
                raise Refused(
                    f"--init-from {source}: is one file and has no config.json beside it that is sure to be its. Name the model with --model"
                )
            raise Refused(
                f"--init-from {source}: no such directory. Give a model directory with config.json and model.safetensors"
            )
        # Not by name: a directory may be called like a size.
        return folder.resolve().name, LlamaConfig.from_pretrained_dir(folder)
    config = config_for(spec)
    path = Path(spec)
    if path.name == "config.json":
        path = path.resolve().parent
    name = spec.strip().lower() if not os.path.exists(spec) else path.name.removesuffix(".json")
    return (name or "model"), config


def _tokenizer_of(settings: Settings) -> Tokenizer:
    chosen, source = settings.data.tokenizer, settings.model.init_from
    if chosen is None and source is not None:
        if not (Path(source) / "tokenizer.json").is_file():
            raise Refused(
                f"--init-from {source}: holds no tokenizer.json, so it is unknown which tokens its weights mean. Name the "
                "tokenizer with --tokenizer (a tokenizer.json, a directory that holds one, or bytes)"
            )
        chosen = source
    return load_tokenizer(chosen)


def _generation_of(settings: Settings, config: LlamaConfig) -> dict[str, Any]:
    source = settings.model.init_from
    if source is not None and (file := Path(source) / "generation_config.json").is_file():
        return read_json(file)
    tokens = config.to_hf()
    found = {
        name: tokens[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if tokens.get(name) is not None
    }
    return {"_from_model_config": True, **found}


def _targets_of(settings: Settings, name: str) -> tuple[Path, Path]:
    output = settings.output
    out = Path(output.out) if output.out is not None else Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if os.path.lexists(out) and not out.is_dir():
        raise Refused(f"--out {out}: exists and is not a directory. Choose another")
    export = Path(output.export) if output.export is not None else out / "export"
    flag = "--export" if output.export is not None else "--out"
    if _within(out, export):
        raise Refused(
            f"--export {export}: is or holds the directory of the run, {out}. Choose a directory beside or in it"
        )
    for file in (METRICS, SETTINGS):
        if _within(export, out / file):
            raise Refused(
                f"--export {export}: is the run's own file {file}, or lies below it. Choose another directory"
            )
    source = settings.model.init_from
    if source is not None and (_within(export, Path(source)) or _within(Path(source), export)):
        raise Refused(
            f"{flag}: {export} and --init-from {source} are the same, or one is in the other. Choose another directory"
        )
    check_target(export)
    _check_writable(out, "--out")
    _check_writable(export, flag)
    return out, export


def _check_unused(export: Path, flag: str) -> None:
    if export.is_dir() and any(export.iterdir()):
        raise Refused(
            f"{flag}: {export} holds a model already, and nothing is overwritten. Choose another directory, or remove this one"
        )


def _within(path: Path, folder: Path) -> bool:
    real, outer = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real == outer or outer in real.parents


def _nearest_existing(path: Path) -> Path:
    path = Path(os.path.abspath(path))
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def _check_writable(path: Path, flag: str) -> None:
    folder = _nearest_existing(path)
    if not folder.is_dir():
        raise Refused(f"{flag} {path}: {folder} is not a directory. Choose another path")
    try:
        # Permission bits tell neither of a read-only file system nor of what root may do. The file has no name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(f"{flag} {path}: {folder} cannot be written ({error.strerror}). Choose another path") from error


def _check_space(export: Path, resolved: Resolved, settings: Settings) -> None:
    dtype = settings.output.export_dtype or ("fp64" if settings.model.dtype == "fp64" else "fp32")
    needed = sum(layout.numel for layout in resolved.layouts) * WEIGHTS[dtype].itemsize
    folder = _nearest_existing(export)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refused(
            f"the exported model takes {needed / 1e9:.1f} GB in {dtype}, but {folder} has {free / 1e9:.1f} GB free. Free some space, "
            "choose another place with --out or --export, or a smaller dtype with --export-dtype"
        )
