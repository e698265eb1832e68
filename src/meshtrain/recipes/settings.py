"""The settings of a training run: their names, types, defaults and one-line helps. Not how they are read or checked.

Each field is a flag of the command line (`seq_len` is `--seq-len`) and a key of a run file. This file imports no torch,
so that `--help` and a mistyped flag are answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, Literal

from tyro.conf import arg

Dtype = Literal["fp32", "bf16", "fp64"]
ExportDtype = Literal["fp32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True)
class MeshSettings:
    """Ranks, and what is cut over them. dp x tp ranks are started here, or joined under torchrun and Slurm."""

    dp: int = 1
    """Ranks along the data axis: FSDP2 shards parameters and optimizer over it, and it divides the batch."""
    tp: int = 1
    """Ranks along the tensor axis: each computes a part of every matrix."""
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        arg(metavar="{cpu,cuda}", help_behavior_hint="(default: cuda where there is one)"),
    ] = None
    """Where the ranks compute."""
    plan: Annotated[str | None, arg(metavar="PLAN", help_behavior_hint="(default: the model's own)")] = None
    """Parallel plan to use instead: package.module:name, or a .toml or .json file."""
    sequence_parallel: bool = True
    """Between the blocks each tp rank holds a part of the sequence only: less memory, same result."""
    loss_parallel: bool = True
    """Each tp rank computes the loss of its part of the vocabulary, and the logits are never gathered."""
    activation_checkpoint: Literal["none", "full"] = "none"
    """Keep all activations for the backward pass, or compute each block again (about a third more compute)."""
    timeout: float = 300.0
    """Seconds after which ranks that wait for one another give up."""


@dataclass(frozen=True)
class ModelSettings:
    """What is trained."""

    model: Annotated[
        str | None, arg(metavar="MODEL", help_behavior_hint="(default: debug, or the model of --init-from)")
    ] = None
    """A size (debug, llama3.2-1b, llama3.2-3b, llama3.1-8b, llama3.1-70b, llama3.1-405b), a config.json, or its directory."""
    init_from: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: random weights from --seed)")] = (
        None
    )
    """Hugging Face model directory (safetensors) whose weights the run starts from."""
    dtype: Dtype = "fp32"
    """Compute dtype. bf16 keeps fp32 master weights and reduces gradients in fp32; fp64 is for checks of exactness."""


@dataclass(frozen=True)
class DataSettings:
    """What it is trained on."""

    data: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="(default: an embedded text of 1 MB)")] = None
    """A text, JSONL or Parquet file, or a folder of them. Tokenised once, then cached."""
    tokenizer: Annotated[
        str | None, arg(metavar="TOKENIZER", help_behavior_hint="(default: that of --init-from, else bytes)")
    ] = None
    """"bytes", a tokenizer.json, or a directory that holds one."""
    seq_len: int = 128
    """Tokens in a sequence."""
    global_batch: int = 16
    """Sequences in a step, over the whole mesh."""
    micro_batch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: a rank's whole share)")] = None
    """Sequences that a dp rank computes at once; gradients are accumulated over the rest of its share."""


@dataclass(frozen=True)
class TrainingSettings:
    """How it is trained: AdamW, with the learning rate as a function of the step."""

    steps: int = 60
    """Optimisation steps. 0 initialises and exports only."""
    lr: float = 3e-3
    """Highest learning rate."""
    warmup: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: a tenth of --steps, at most 2000)")
    ] = None
    """Steps over which the learning rate rises to --lr."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up: fall to a tenth as a cosine or a line, over the last fifth only (wsd), or stay."""
    weight_decay: float = 0.1
    """Decay of matrices (never of norms and biases), relative to the learning rate."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm where theirs is larger; inf turns clipping off."""
    seed: int = 0
    """Decides the initial weights, the order of the data and the sample of text."""

    @property
    def warmup_steps(self) -> int:
        """--warmup, or what its absence means."""
        return min(2000, self.steps // 10) if self.warmup is None else self.warmup


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints, and going on from them. Each is a Hugging Face model directory too: OUT/checkpoints/step-NNNNNNNN."""

    save_every: int = 0
    """Steps between checkpoints; 0 for none by steps. One is written at the end and when interrupted, unless both are 0."""
    save_minutes: float = 10.0
    """Minutes between checkpoints; 0 for none by time."""
    keep: int = 3
    """Newest checkpoints to keep; 0 for all of them."""
    keep_every: int = 0
    """Keep those at multiples of this many steps for good; 0 for none."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """When a checkpoint cannot be written: end the run, or say so and go on."""
    resume: str = "auto"
    """auto goes on where --out holds a run; never refuses to; a checkpoint, or the directory of a run, is started from."""
    allow_change: Annotated[str | None, arg(metavar="NAMES", help_behavior_hint="(default: none)")] = None
    """Settings that may differ from those of the resumed run though they alter its course, as in steps,lr."""
    max_restarts: int = 0
    """How often to start the ranks anew, from the newest checkpoint, after one failed."""
    elastic: bool = False
    """Start anew with fewer ranks along dp when ranks were lost."""


@dataclass(frozen=True)
class OutputSettings:
    """What it leaves behind."""

    out: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: runs/MODEL-DATE-TIME)")] = None
    """Directory of the run: metrics.jsonl, settings.json, checkpoints/ and, unless --export says otherwise, export/."""
    export: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: OUT/export)")] = None
    """Directory for the trained model, in the form that transformers opens."""
    export_dtype: Annotated[
        ExportDtype | None, arg(metavar="{fp32,bf16,fp16,fp64}", help_behavior_hint="(default: that of the weights)")
    ] = None
    """Dtype of the exported weights."""
    sample: int = 120
    """Tokens of text that the model writes at the end; 0 for none."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, by group. `items` gives them as one flat list, as the command line does."""

    mesh: MeshSettings = field(default_factory=MeshSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    config: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Run file (TOML) with these settings as keys; the command line wins over it."""

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each setting under its flag's name without the dashes in front ("seq-len")."""
        for group, name in GROUP_OF.items():
            yield flag_of(group), getattr(getattr(self, name), group)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON, which has no infinity: it is text there, as on the command line."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.items()
        }


def flag_of(name: str) -> str:
    """The flag of a field, without the leading dashes: seq_len -> seq-len."""
    return name.replace("_", "-")


def _groups() -> dict[str, type[Any]]:
    return {
        "mesh": MeshSettings, "model": ModelSettings, "data": DataSettings, "training": TrainingSettings,
        "checkpoint": CheckpointSettings, "output": OutputSettings,
    }  # fmt: skip


GROUPS = _groups()
GROUP_OF: dict[str, str] = {f.name: group for group, kind in GROUPS.items() for f in fields(kind)}
"""Field -> the group that holds it."""
FIELDS: dict[str, Field[Any]] = {f.name: f for kind in GROUPS.values() for f in fields(kind)}
