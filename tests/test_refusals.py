"""Bad input is refused before anything starts: by a message that names the thing, its value and the way out, with exit
status 2 (a command) or Refused and ContractError (a call), with no rank started and nothing written.

One table, by kind of input. A case catches a check that is lost, comes too late, or says too little to act on.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from meshtrain import __main__ as tools
from meshtrain import load_pretrained, save_checkpoint, save_pretrained, state_of
from meshtrain.data import ByteTokenizer, TokenDataset
from meshtrain.errors import ContractError, Refused
from meshtrain.launch import launch
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import ParallelPlan, load_plan, resolve
from meshtrain.parallel.styles import column, embedding, head, heads, packed_column, replicate, sequence
from meshtrain.recipes import llama as recipe

pytestmark = pytest.mark.timeout(120)
Make = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class Bad:
    """One bad input, and what the message about it must contain."""

    name: str
    attempt: str | Callable[[], object]
    """Arguments of the training program (of the tools, after "meshtrain "), or a call. Runs in the case's own folder."""
    thing: str
    value: str
    way_out: str
    files: Mapping[str, Make] = field(default_factory=dict)
    """Path in the folder -> its content, or what makes it."""
    env: Mapping[str, str] = field(default_factory=dict)
    leaves_tokens: bool = False
    """Only the tokens can show it, and those are kept: the same data is not tokenised twice."""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


# Flags.

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
}  # fmt: skip
OLD_RUN: dict[str, Make] = {"out/metrics.jsonl": "{}\n"}
OLD_EXPORT: dict[str, Make] = {**OLD_RUN, "out/export/model.safetensors": ""}

FLAGS = [
    Bad("unknown flag", "--pipeline 2", "unknown flag", "--pipeline", "--help lists all flags"),
    Bad("misspelt flag", "--warmpu 10", "unknown flag", "--warmpu", "did you mean --warmup?"),
    Bad("misspelt switch", "--no-sequence-paralel", "unknown flag", "--no-sequence-paralel", "did you mean --no-sequence-parallel?"),
    Bad("single dash", "-dp 2", "unknown flag", "-dp", "did you mean --dp?"),
    Bad("value without a flag", "4 2", "stands alone", "'4'", "every value follows a flag"),
    Bad("number as text", "--steps many", "--steps", "many", "--help"),
    Bad("fraction for a count", "--tp 1.5", "--tp", "1.5", "--help"),
    Bad("unknown choice", "--dtype int8", "--dtype", "int8", "bf16"),
    Bad("flag without its value", "--steps", "'--steps'", "Expected 1 value", "--help"),
    Bad("zero dp", "--dp 0", "--dp is 0", "1 or more", "Leave the flag out for 1"),
    Bad("negative tp", "--tp -2", "--tp is -2", "1 or more", "Leave the flag out for 1"),
    Bad("batch that dp does not divide", "--dp 4 --global-batch 6", "global batch of 6", "dp 4", "Use 4 or 8"),
    Bad("micro-batch", "--dp 2 --global-batch 12 --micro-batch 4", "global batch of 12", "micro-batch 4", "a micro-batch of 3"),
    Bad("zero sequence length", "--seq-len 0", "--seq-len is 0", "1 or more", "Correct it"),
    Bad("sequence longer than the model's", "--seq-len 4096", "--seq-len 4096", "max_position_embeddings 2048", "Use shorter sequences"),
    Bad("warm-up longer than the run", "--steps 10 --warmup 20", "--warmup is 20", "--steps (10)", "Shorten"),
    Bad("negative steps", "--steps -1", "--steps is -1", "0 (initialise and export only) or more", "Correct it"),
    Bad("learning rate of zero", "--lr 0", "--lr is 0.0", "positive", "Correct it"),
    Bad("learning rate that is none", "--lr nan", "--lr is nan", "positive", "Correct it"),
    Bad("negative seed", "--seed -1", "--seed is -1", "0 to 2**63 - 1", "Choose another"),
    Bad("negative clip", "--max-norm -1", "--max-norm is -1.0", "above 0", "Use inf"),
    Bad("world size", "--dp 4 --tp 2", "dp 4 x tp 2", "there are 4", "choose sizes whose product is 4", env=TORCHRUN),
    Bad("half a launcher", "", "MASTER_PORT is not set", "RANK, WORLD_SIZE", "unset", env={**TORCHRUN, "MASTER_PORT": ""}),
    Bad("rank beyond the world", "--dp 4", "RANK", "'9'", "unset RANK", env={**TORCHRUN, "RANK": "9"}),
    Bad("a run is there already", "--out out --resume never", "--out out", "holds a run already", "Choose another directory", OLD_RUN),
    Bad("a run that left its export only", "--out out", "--out out", "left no checkpoint to go on from", "Choose another directory", OLD_EXPORT),
    Bad("negative steps between saves", "--save-every -1", "--save-every is -1", "0 or more", "--help says what 0 means"),
    Bad("minutes that are none", "--save-minutes nan", "--save-minutes is nan", "finite", "Use 0 for none"),
    Bad("negative number to keep", "--keep -1", "--keep is -1", "0 or more", "--help says what 0 means"),
    Bad("negative milestones", "--keep-every -5", "--keep-every is -5", "0 or more", "--help says what 0 means"),
    Bad("unknown choice after a failed save", "--on-save-error retry", "--on-save-error", "retry", "warn"),
    Bad("elastic without restarts", "--elastic", "--elastic", "--max-restarts is 0", "Give --max-restarts, as in 10"),
    Bad("change of no such setting", "--allow-change stepz", "--allow-change stepz", "no setting of that name", "did you mean steps?"),
    Bad("change of what may change anyway", "--allow-change micro-batch", "--allow-change micro-batch", "no setting of that name", "They are model"),
    Bad("resume from nowhere", "--resume nowhere", "--resume nowhere", "no such directory", "Give auto, never, a checkpoint, or"),
    Bad("resume from a file", "--resume notes", "--resume notes", "no such directory", "or the directory of a run", {"notes": "mine"}),
    Bad("resume from an empty directory", "--resume empty", "empty: has no training/manifest.json", "no checkpoint to resume from", "--init-from", {"empty": os.mkdir}),
    Bad("out is a file", "--out notes", "--out notes", "not a directory", "Choose another", {"notes": "mine"}),
    Bad("export over a user's files", "--export mine", "mine", "'notes.txt'", "Choose another path", {"mine/notes.txt": "mine"}),
    Bad("cache that cannot be made", "", "$MESHTRAIN_CACHE", "'a-file", "Name a writable folder", {"a-file": ""}, {"MESHTRAIN_CACHE": "a-file/x"}),
    Bad("unknown tool", "meshtrain exprot a b", "unknown command", "'exprot'", "did you mean export?"),
    Bad("unknown flag of a tool", "meshtrain export a b --dtpye bf16", "unknown flag", "--dtpye", "did you mean --dtype?"),
    Bad("tool without its argument", "meshtrain export a", "OUT", "required", "--help"),
    Bad("size of no unit", "meshtrain export a b --max-shard-size 5parsec", "max_shard_size", "'5parsec'", "'512MiB'"),
    Bad("no ranks", lambda: launch(print, world_size=0, device="cpu"), "ranks were asked for", "0", "1 or more"),
]  # fmt: skip


def run_file(content: str | bytes) -> dict[str, Make]:
    return {"run.toml": content}


RUN_FILES = [
    Bad("no run file", "--config nowhere.toml", "--config nowhere.toml", "No such file", "Give the path of a TOML file"),
    Bad("broken TOML", "--config run.toml", "run.toml", "line 2", "Correct it there", run_file("dp = 2\ntp = = 2\n")),
    Bad("run file that is no text", "--config run.toml", "run.toml", "0xff", "Correct it there", run_file(b"\xff\xfe\n")),
    Bad("unknown key", "--config run.toml", "run.toml, line 3", "'micro_batchs'", "did you mean micro-batch?", run_file("dp = 1\n\nmicro_batchs = 1\n")),
    Bad("unlike any key", "--config run.toml", "run.toml, line 1", "'zzzzzzz'", "--help", run_file("zzzzzzz = 1\n")),
    Bad("wrong type", "--config run.toml", "run.toml, line 2: steps", "'100'", "a whole number", run_file("dp = 1\nsteps = '100'\n")),
    Bad("number for a switch", "--config run.toml", "loss-parallel", "is 1", "true or false", run_file("loss-parallel = 1\n")),
    Bad("choice of a run file", "--config run.toml", "dtype", "'fp8'", "one of 'fp32', 'bf16', 'fp64'", run_file("dtype = 'fp8'\n")),
    Bad("table", "--config run.toml", "run.toml, line 1", "[mesh]", "Write its keys at the top", run_file("[mesh]\ndp = 2\n")),
    Bad("key twice", "--config run.toml", "line 2", "'seq_len'", "Remove one", run_file("seq-len = 8\nseq_len = 9\n")),
    Bad("key of both kinds", "--config run.toml --dp 1", "--tp is 0", "1 or more", "Leave the flag out", run_file("tp = 0\n")),
]  # fmt: skip

# Plans.

TINY = LlamaConfig(320, 16, 24, 2, 4, 2, max_position_embeddings=256)
MLP = "model.layers.*.mlp"
MLP_PARTS = tuple(f"{MLP}.{name}_proj" for name in ("gate", "up", "down"))


def llama(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return Llama(replace(TINY, **changes))


class Fused(nn.Module):
    """Modules that plans stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.norm, self.table = nn.Linear(8, 24), nn.LayerNorm(8), nn.Embedding(6, 8)
        self.odd, self.drop = nn.Linear(8, 7), nn.Dropout(0.1)


class Scalar(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(value, requires_grad=value.is_floating_point())


def planned(
    styles: Mapping[str, Any] | None = None,
    *,
    drop: tuple[str, ...] = (),
    units: Any = None,
    tp: int = 2,
    model: Callable[[], nn.Module] = llama,
    **options: Any,
) -> Callable[[], object]:
    """Resolve Llama's plan, changed so, on 1 x tp."""

    def attempt() -> object:
        own = parallel_plan()
        kept = {pattern: style for pattern, style in own.styles.items() if pattern not in drop}
        plan = ParallelPlan({**kept, **(styles or {})}, own.units if units is None else units)
        return resolve(plan, model(), (1, tp), **options)

    return attempt


FUSED = {
    "qkv_proj": packed_column(heads=(2, 2, 2)),
    "norm": sequence(),
    "table": embedding(),
    "odd": column(),
    "drop": replicate(),
}


def fused(tp: int = 2, without: str = "", **styles: Any) -> Callable[[], object]:
    """Resolve a plan for Fused, changed so, on 1 x tp."""
    chosen = {name: style for name, style in {**FUSED, **styles}.items() if name != without}
    return lambda: resolve(ParallelPlan(chosen), Fused(), (1, tp))


def scalar(value: Tensor) -> Callable[[], object]:
    return lambda: resolve(ParallelPlan({"": replicate()}), Scalar(value), (1, 1))


def plan_file(styles: str, name: str = "plan.toml") -> dict[str, Make]:
    return {name: f"units = []\n[styles]\n{styles}\n"}


def a_number() -> int:
    return 3


HERE = f"{__name__}:"

PLANS = [
    Bad("no match, one near", planned({f"{MLP}.gate_pro": column()}), f"'{MLP}.gate_pro'", "matches no module of the Llama", f"did you mean '{MLP}.gate_proj'"),
    Bad("no match, none near", planned({"zzz": column()}), "'zzz'", "matches no module of the Llama", "Correct the pattern, or drop it"),
    Bad("unit without a match", planned(units=("model.layer.*",)), "unit 'model.layer.*'", "matches no module", "did you mean 'model.layers.*'"),
    Bad("entry on a parameter", planned({"lm_head.weight": head()}), "'lm_head.weight'", "names a parameter", "write 'lm_head'"),
    Bad("uncovered parameter", planned(drop=("model.norm",)), "covers no parameter", "'model.norm.weight'", "'model.norm': sequence()"),
    Bad("covered by two patterns", planned({"lm_hea*": head()}), "'lm_head' is covered twice", "'lm_hea*'", "drop one"),
    Bad("covered from above", planned({MLP: replicate()}), "gate_proj.weight' is covered twice", f"'{MLP}'", "Drop one"),
    Bad("tp does not divide the heads", planned(tp=3), "q_proj", "tp 3 would cut a head of its 4 heads", "tp can be 1, 2, 4"),
    Bad("tp over the heads", planned(tp=8), "q_proj", "tp 8", "tp can be 1, 2, 4"),
    Bad("heads that do not fit the size", planned({MLP_PARTS[0]: heads(5)}), "gate_proj", "24 is not a multiple of its 5 heads", "Correct the number of heads"),
    Bad("heads that the config lacks", planned({MLP_PARTS[0]: heads("n_head")}), "config.n_head", "None", "write the number in the plan"),
    Bad("heads shared unevenly", planned({MLP_PARTS[0]: heads(3, shared_by=4)}), "gate_proj", "4 query heads cannot share 3", "Correct the config"),
    Bad("empty shard", planned(tp=4, model=lambda: llama(vocab_size=5)), "'model.embed_tokens'", "the vocabulary is 5, and tp 4", "Use tp 3 or less"),
    Bad("tie over two units", planned(units=("model.layers.*", "lm_head"), model=lambda: llama(tie_word_embeddings=True)), "'lm_head.weight'", "the unit 'lm_head'", "Leave both to the root"),
    Bad("tie cut in two ways", planned({"lm_head": replicate()}, model=lambda: llama(tie_word_embeddings=True)), "one (tied) parameter", "cut it differently", "Use styles that agree"),
    Bad("empty unit", planned(units=(MLP, *MLP_PARTS)), "the unit 'model.layers.0.mlp'", "no parameter of its own", "Leave it out"),
    Bad("container as a unit", planned(units=("model.layers",)), "the unit 'model.layers'", "ModuleList", "'model.layers.*'"),
    Bad("container with a style", planned({"model.layers": replicate()}), "'model.layers'", "ModuleList", "'model.layers.*'"),
    Bad("unit inside a whole", planned({MLP: replicate()}, drop=MLP_PARTS, units=(MLP_PARTS[0],)), "mlp.gate_proj' lies inside", "'model.layers.0.mlp'", "the unit, or give"),
    Bad("unit twice", planned(units=("model.layers.*", "model.layers.0")), "'model.layers.0' is named twice", "'model.layers.*'", "Drop one"),
    Bad("root as a unit", planned(units=("",)), "the whole model", "''", "leave '' out"),
    Bad("units as one word", planned(units="model.layers.*"), "units=", "'model.layers.*'", "('model.layers.*',)"),
    Bad("style not called", planned({"lm_head": head}), "'lm_head'", "not a style", "with parentheses"),
    Bad("fused weight under column()", fused(qkv_proj=column()), "'qkv_proj'", "fused into one", "Use packed_column(parts=2)"),
    Bad("parts that do not divide", fused(qkv_proj=packed_column(parts=5)), "'qkv_proj'", "24 into 5 equal parts", "Correct `parts`"),
    Bad("heads of fused parts", fused(3), "'qkv_proj'", "2 is not a multiple of 3", "Use a tp that divides"),
    Bad("column() on a norm", fused(norm=column()), "'norm' is a LayerNorm", "column()", "Use replicate()"),
    Bad("embedding() on a matrix", fused(odd=embedding()), "'odd' is a Linear", "embedding() is for nn.Embedding", "Use column()"),
    Bad("head() on a table", fused(table=head()), "'table' is a Embedding", "head() is for nn.Linear", "Use embedding()"),
    Bad("torch's style on an odd size", fused(odd=ColwiseParallel()), "'odd.weight'", "size 7, which tp 2", "Use meshtrain's own style"),
    Bad("dropout that nothing covers", fused(without="drop"), "does not cover 'drop'", "p=0.1", "Add 'drop': sequence()"),
    Bad("sequence parallelism without an end", planned({"lm_head": column()}, sequence_parallel=True), "sequence parallelism", "no entry says", "Add it, or turn"),
    Bad("scalar parameter", scalar(torch.tensor(1.0)), "'gain'", "no dims", "Make it a tensor of shape [1]"),
    Bad("integer parameter", scalar(torch.ones(2, dtype=torch.int64)), "'gain'", "torch.int64", "Make it a buffer"),
    Bad("mesh without ranks", planned(tp=0), "dp 1 x tp 0", "no ranks", "at least 1"),
    Bad("style name in a file", "--plan plan.toml", "plan.toml, 'lm_head'", "'haed'", "did you mean 'head'", plan_file('"lm_head" = "haed"')),
    Bad("argument in a file", "--plan plan.toml", "plan.toml, 'lm_head'", "head()", "Correct them", plan_file('"lm_head" = { style = "head", size = 3 }')),
    Bad("number as a style", "--plan plan.toml", "plan.toml, 'lm_head'", "is 3", "the name of a style", plan_file('"lm_head" = 3')),
    Bad("key in a plan file", "--plan plan.toml", "plan.toml", "'stylse'", "did you mean 'styles'", {"plan.toml": "[styles]\n[stylse]\n"}),
    Bad("file plan that does not fit", "--plan plan.toml --no-sequence-parallel", "plan.toml", "'lm_haed'", "did you mean 'lm_head'", plan_file('"lm_haed" = "head"')),
    Bad("plan file of broken JSON", "--plan plan.json", "plan.json", "not valid JSON", "Correct it there", {"plan.json": "{"}),
    Bad("no plan file", "--plan nowhere.toml", "nowhere.toml", "No such file", "Give the path"),
    Bad("not a plan", lambda: load_plan(HERE + "TINY"), HERE + "TINY", "LlamaConfig", "Name a ParallelPlan"),
    Bad("function that gives no plan", lambda: load_plan(HERE + "a_number"), HERE + "a_number", "int", "Name a ParallelPlan"),
    Bad("function that wants arguments", "--plan json:loads", "'json:loads'", "argument", "without arguments"),
    Bad("no such module", "--plan no_such_package.plans:plan", "'no_such_package.plans'", "No module named", "on PYTHONPATH?"),
    Bad("module that does not import", "--plan broken_module:plan", "'broken_module'", "division by zero", "line 1). Correct it", {"broken_module.py": "1 / 0\n"}, {"PYTHONPATH": "."}),
    Bad("no such name", "--plan meshtrain.models.llama:paralel_plan", "'meshtrain.models.llama'", "'paralel_plan'", "did you mean 'parallel_plan'"),
    Bad("no name at all", "--plan my_plan", "'my_plan'", "cannot read the plan", "package.module:name"),
]  # fmt: skip

# Configs.


def config(**changes: Any) -> dict[str, Make]:
    """A config.json that is right but for the changes; None takes a key out."""
    return {
        "config.json": json.dumps(
            {key: value for key, value in {**TINY.to_hf(), **changes}.items() if value is not None}
        )
    }


def bad_config(name: str, thing: str, value: str, way_out: str, **changes: Any) -> Bad:
    return Bad(name, "--model config.json", f"config.json: {thing}", value, way_out, config(**changes))


CONFIGS = [
    bad_config("architecture", "model_type", "'gpt2'", "Use the config.json of a LlamaForCausalLM", model_type="gpt2"),
    bad_config("class of the model", "architectures", "'LlamaModel'", "bring your own model", architectures=["LlamaModel"]),
    bad_config("missing key", "hidden_size is missing", "needs vocab_size", "Add hidden_size", hidden_size=None),
    bad_config("type of a key", "num_hidden_layers", "'two'", "Correct num_hidden_layers", num_hidden_layers="two"),
    bad_config("heads that do not divide the width", "hidden_size", "16", "Change one of the two", num_attention_heads=3),
    bad_config("kv heads that do not divide the heads", "num_attention_heads", "(3)", "Change one of the two", num_key_value_heads=3),
    bad_config("odd head size", "head_dim", "5", "Set an even head_dim", head_dim=5),
    bad_config("rope type", "rope_scaling: rope_type", "'yarn'", "Use another model", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    bad_config("rope without its factor", "rope_scaling: factor", "None", "Correct factor", rope_scaling={"rope_type": "linear"}),
    bad_config("activation", "hidden_act", "'gelu'", "Use another model", hidden_act="gelu"),
    bad_config("quantised", "quantization_config", "'bits': 4", "Use the unquantized model", quantization_config={"bits": 4}),
    Bad("small vocabulary", "--model config.json", "vocab_size is 100", "320 ids", "or a model with vocab_size >= 320", config(vocab_size=100)),
    Bad("config that is no JSON", "--model config.json", "config.json", "is not JSON", "Restore the file", {"config.json": "{,"}),
    Bad("config that is a list", "--model config.json", "config.json", "holds a list", "Use the config.json of", {"config.json": "[1]"}),
    Bad("unknown size", "--model llama3.1-7b", "model 'llama3.1-7b'", "no preset", "Did you mean llama3.1-70b"),
    Bad("folder without a config", "--model empty", "empty/config.json", "No such file", "Check the path", {"empty": os.mkdir}),
]  # fmt: skip

# Data.


def parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["some text"]}), path)


GOOD_LINE = '{"text": "a line"}\n'

DATA = [
    Bad("no such path", "--data corpus/book.txt", "data 'corpus/book.txt'", "its folder has 'books.txt'", "leave it out to use the embedded text", {"corpus/books.txt": "x"}),
    Bad("empty folder", "--data corpus", "data folder 'corpus'", "it is empty", ".jsonl", {"corpus": os.mkdir}),
    Bad("folder of other files", "--data corpus", "data folder 'corpus'", "'a.csv'", "convert or rename", {"corpus/a.csv": "x"}),
    Bad("packed file", "--data a.txt.gz", "data file 'a.txt.gz'", ".gz files are not unpacked", "Unpack it first", {"a.txt.gz": b"\x1f\x8b"}),
    Bad("empty file", "--data a.txt", "data 'a.txt'", "is empty", "Give files with text", {"a.txt": ""}),
    Bad("broken line", "--data a.jsonl", "a.jsonl, line 2", "not valid JSON", "must be one JSON object", {"a.jsonl": GOOD_LINE + "{text: 1}\n"}),
    Bad("line that is a list", "--data a.jsonl", "a.jsonl, line 1", "a JSON array", "must be one JSON object", {"a.jsonl": '["text"]\n'}),
    Bad("key that is missing", "--data a.jsonl", "a.jsonl, line 2", 'keys are "body"', 'Rename the key that holds the text to "text"', {"a.jsonl": GOOD_LINE + '{"body": "x"}\n'}),
    Bad("text that is a number", "--data a.jsonl", 'a.jsonl, line 1, key "text"', "number", "Convert it", {"a.jsonl": '{"text": 3}\n'}),
    Bad("text of another encoding", "--data a.txt", "a.txt", "byte 3 is not UTF-8", "iconv -f ITS_ENCODING -t UTF-8", {"a.txt": "café".encode("latin-1") * 9 + b" au lait"}),
    Bad("line of another encoding", "--data a.jsonl", "a.jsonl, line 2", "not UTF-8", "Convert the file to UTF-8", {"a.jsonl": GOOD_LINE.encode() + b'{"text": "\xe9"}\n'}),
    Bad("Parquet without the column", "--data a.parquet", "a.parquet", 'columns are "body"', 'Rename the column that holds the text to "text"', {"a.parquet": parquet}),
    Bad("Parquet that is none", "--data a.parquet", "a.parquet", "cannot be read as Parquet", "convert it to .jsonl", {"a.parquet": b"PAR1 but no more"}),
    Bad("too short", "--data a.txt --seq-len 128", "the data has 11 tokens", "128 takes 129", "Give more data, or a sequence length of at most 10", {"a.txt": "ten bytes."}, leaves_tokens=True),
    Bad("no tokenizer", "--tokenizer gpt2", "tokenizer 'gpt2'", "no such file or folder", 'Give "bytes"'),
    Bad("tokenizer without a vocabulary", "--tokenizer tokenizer.json", "tokenizer 'tokenizer.json'", "cannot load it", "Give the tokenizer.json of", {"tokenizer.json": "{}"}),
    Bad("tokens that are no integers", lambda: TokenDataset(torch.ones(2, 3), 2, 0), "TokenDataset", "[2, 3] torch.float32", "flatten it"),
    Bad("token of another vocabulary", lambda: ByteTokenizer().decode([999]), "token id 999", "0..319", "decode ids that come from this tokenizer"),
]  # fmt: skip

# Checkpoints. `model` is a good one, of TINY, with a config, a tokenizer and one file of weights; each case spoils it.

WEIGHTS, INDEX = "model/model.safetensors", "model/model.safetensors.index.json"
NORM = "model.norm.weight"


@functools.cache
def good_files() -> dict[str, bytes]:
    """The files of a model directory that nothing is wrong with."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Llama(TINY), Path(folder, "model"), tokenizer=ByteTokenizer())
        return {path.name: path.read_bytes() for path in Path(folder, "model").iterdir()}


def good_model(folder: Path) -> None:
    folder.mkdir()
    for name, content in good_files().items():
        (folder / name).write_bytes(content)


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Spoil the tensors."""

    def make(path: Path) -> None:
        state = load_file(path)
        change(state)
        save_file(state, path)

    return make


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def header(fields: Any, data: int = 8, length: int | None = None) -> Make:
    """The bytes of a file with this header."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def tensor(begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace_it(path: Path) -> None:
        path.unlink()
        make(path)

    return replace_it


def index(weight_map: Any) -> dict[str, Make]:
    """An index, and the file of weights under the name of a shard; the file beside the folder is a good one, too."""

    def move(path: Path) -> None:
        path.rename(path.parent / "model-00001-of-00001.safetensors")
        shutil.copy(path.parent / "model-00001-of-00001.safetensors", path.parent.parent / "outside.safetensors")

    return {WEIGHTS: move, INDEX: json.dumps({"metadata": {}, "weight_map": weight_map})}


def bad_weights(
    name: str, thing: str, value: str, way_out: str, make: Make | None = None, *, flags: str = "", **files: Make
) -> Bad:
    spoilt = {WEIGHTS: make} if make is not None else files
    return Bad(name, f"--init-from model {flags}", thing, value, way_out, {"model": good_model, **spoilt})


@functools.cache
def good_checkpoint_files() -> dict[str, bytes]:
    """The files of a checkpoint that nothing is wrong with."""
    torch.manual_seed(0)
    model = Llama(TINY)
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(model, stepped(torch.optim.AdamW, model), Path(folder, "ckpt"), step=3)
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def good_checkpoint(folder: Path) -> None:
    (folder / "training").mkdir(parents=True)
    for name, content in good_checkpoint_files().items():
        (folder / name).write_bytes(content)


def bad_checkpoint(
    name: str, thing: str, value: str, way_out: str, make: Callable[[Path], object] | None = None, training: str = ""
) -> Bad:
    """A checkpoint with one file spoilt: that of the weights, or one of training/."""
    file = f"ckpt/training/{training}" if training else "ckpt/model.safetensors"
    return Bad(
        name, "--resume ckpt", thing, value, way_out, {"ckpt": good_checkpoint, **({file: make} if make else {})}
    )


def stepped(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def trainee(kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, stepped(kind, model)


ONE = json.dumps(tensor()).encode()
ANOTHER = "take another checkpoint"
FETCH = "fetch or export it again"
CHECKPOINTS = [
    Bad("no such checkpoint", "--init-from nowhere", "--init-from nowhere", "no such directory", "Give a model directory"),
    bad_weights("truncated", WEIGHTS, "truncated", FETCH, cut_off),
    bad_weights("empty weights", WEIGHTS, "0 bytes, too short", FETCH, b""),
    bad_weights("not safetensors", WEIGHTS, "a pickle, which is never loaded", "Convert it to safetensors", b"\x80\x02" + bytes(30)),
    bad_weights("git-lfs pointer", WEIGHTS, "a git-lfs pointer", "git lfs pull", "version https://git-lfs.github.com/spec/v1\n"),
    bad_weights("missing tensor", "1 missing", f"'{NORM}'", "config.json beside the weights", weights(lambda s: s.pop(NORM))),
    bad_weights("renamed tensor", "1 unexpected", f"'{NORM}x' (near: '{NORM}')", "rename the keys", weights(lambda s: s.update({NORM + "x": s.pop(NORM)}))),
    bad_weights("shape of a tensor", f"'{NORM}'", "shape [8], the model [16]", "config.json beside the weights", weights(lambda s: s.update({NORM: torch.ones(8)}))),
    bad_weights("dtype of a tensor", f"'{NORM}'", "dtype I64", "config.json beside the weights", weights(lambda s: s.update({NORM: torch.ones(16, dtype=torch.int64)}))),
    bad_weights("weights of another model", "'model.embed_tokens.weight'", "[320, 16], the model [320, 128]", "config.json beside", flags="--model debug"),
    bad_weights("header of exabytes", WEIGHTS, "9223372036854775808 is above the limit", FETCH, header({"a": tensor()}, length=2**63)),
    bad_weights("header past the end", WEIGHTS, "5000 goes past the end", FETCH, header({"a": tensor()}, length=5000)),
    bad_weights("overlapping offsets", WEIGHTS, "'b' begins at byte 4", FETCH, header({"a": tensor(), "b": tensor(4, 12)}, 12)),
    bad_weights("hole", WEIGHTS, "leaves a hole", FETCH, header({"a": tensor(), "b": tensor(12, 20)}, 20)),
    bad_weights("name twice", WEIGHTS, "'a' occurs twice", FETCH, header(b'{"a":' + ONE + b',"a":' + ONE + b"}")),
    bad_weights("name that is a path", WEIGHTS, "'../../a'", FETCH, header({"../../a": tensor()})),
    bad_weights("deep header", WEIGHTS, "nested too deep", FETCH, header(b'{"a":' + b"[" * 200_000)),
    bad_weights("index that points outside", INDEX, "'../outside.safetensors'", "Put the files beside the index", **index({NORM: "../outside.safetensors"})),
    bad_weights("index with an absolute path", INDEX, "'/tmp/x.safetensors'", "Put the files beside the index", **index({NORM: "/tmp/x.safetensors"})),
    bad_weights("index of a missing file", INDEX, "'model-00002-of-00002.safetensors'", "fetch that file", **index({NORM: "model-00002-of-00002.safetensors"})),
    bad_weights("index of another model", INDEX, "'b'", "fetch both again", **index({"b": "model-00001-of-00001.safetensors"})),
    bad_weights("index of nothing", INDEX, "weight_map", FETCH, **index({})),
    bad_weights("link out of the folder", WEIGHTS, "outside its folder", "copy the file", instead(lambda path: path.symlink_to("/etc/hostname"))),
    bad_weights("pipe", WEIGHTS, "not a regular file", "copy the data into one", instead(lambda path: os.mkfifo(path))),
    bad_weights("folder of pickles", "model", "'pytorch_model.bin'", "Convert the model to safetensors first", instead(lambda path: (path.parent / "pytorch_model.bin").touch())),
    bad_weights("no tokenizer beside the weights", "--init-from model", "holds no tokenizer.json", "--tokenizer", **{"model/tokenizer.json": lambda path: path.unlink()}),
    bad_weights("export over the source", "--export: model", "--init-from model are the same", "Choose another directory", flags="--export model"),
    Bad("tool on a broken file", "meshtrain export model out", WEIGHTS, "truncated", FETCH, {"model": good_model, WEIGHTS: cut_off}),
    Bad("tool over its source", "meshtrain export model model", "model", "is or holds the source", "choose another directory", {"model": good_model}),
    Bad("call on a file of another kind", lambda: load_pretrained(nn.Linear(1, 1), "a.bin"), "a.bin", "expected a model directory", "give one of these", {"a.bin": b"x"}),
    Bad("layouts of a plain model", lambda: state_of(nn.Linear(1, 1)), "Linear", "parallelize", "first"),
    Bad("resume from a model", "--resume model", "model: has no training/manifest.json", "no checkpoint to resume from", "use load_pretrained or --init-from", {"model": good_model}),
    bad_checkpoint("checkpoint that is cut off", "ckpt/model.safetensors: has", "were written", ANOTHER, cut_off),
    bad_checkpoint("checkpoint without its moments", "ckpt/training/exp_avg.safetensors", "is missing", ANOTHER, Path.unlink, "exp_avg.safetensors"),
    bad_checkpoint("checkpoint without its state", "ckpt/training/state.json", "is missing", ANOTHER, Path.unlink, "state.json"),
    bad_checkpoint("checkpoint without its manifest", "ckpt: training/manifest.json", "is missing", ANOTHER, Path.unlink, "manifest.json"),
    bad_checkpoint("checkpoint whose manifest changed", "ckpt/training/manifest.json", "damaged after it was written", ANOTHER, cut_off, "manifest.json"),
    bad_checkpoint("checkpoint with a pipe in it", "ckpt/training/state.json", "not a regular file", "copy the data into one", instead(os.mkfifo), "state.json"),
    bad_checkpoint("checkpoint of another program", "ckpt: does not say which settings its run had", "not written by this program", "Start from its weights with --init-from"),
    Bad("a step that is none", lambda: save_checkpoint(*trainee(), "out", step=-1), "step is -1", "number of steps made", "0 or more"),
    Bad("what is no JSON for a checkpoint", lambda: save_checkpoint(*trainee(), "out", step=1, run={"a": math.nan}), "run['a']", "'nan', which is not JSON", "finite numbers"),
    Bad("optimizer of another model", lambda: save_checkpoint(trainee()[0], trainee()[1], "out", step=1), "a parameter of shape [1, 1]", "does not have", "Build the optimizer on this model"),
    Bad("moments of another shape", lambda: save_checkpoint(*trainee(torch.optim.Adafactor), "out", step=1), "'eps'", "tuple", "elementwise"),
    Bad("tokenizer of no kind", lambda: save_pretrained(nn.Linear(1, 1), "out", tokenizer=3), "tokenizer", "int", "give a directory with tokenizer files"),
]  # fmt: skip

TABLE = [*FLAGS, *RUN_FILES, *PLANS, *CONFIGS, *DATA, *CHECKPOINTS]
AS_COMMANDS = {
    "misspelt flag",
    "number as text",
    "unknown key",
    "style name in a file",
    "overlapping offsets",
    "tool on a broken file",
}
"""Those that are run as real commands too."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a cache beside it; no launcher is around, and none can be started."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("MESHTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in [*TORCHRUN, "SLURM_PROCID"]:
        monkeypatch.delenv(name, raising=False)

    def started() -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", started)
    monkeypatch.setattr(recipe, "train_on_rank", started)
    return place


def make(bad: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in bad.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    for name, value in bad.env.items():
        monkeypatch.setenv(name, value)
        if name == "PYTHONPATH":
            monkeypatch.syspath_prepend(str(folder / value))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """All that lies in a folder, with what changes when it is written to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name != "__pycache__" and "__pycache__" not in path.parts:
            status = path.lstat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found


def command(bad: Bad) -> tuple[Callable[[list[str]], int], str, list[str]]:
    """A case's program: as a function, as a module, and its arguments."""
    assert isinstance(bad.attempt, str)
    arguments = shlex.split(bad.attempt)
    if arguments[:1] == ["meshtrain"]:
        return tools.main, "meshtrain", arguments[1:]
    return recipe.main, "meshtrain.recipes.llama", arguments


def plain(text: str) -> str:
    """The text without a frame and its line breaks."""
    return re.sub(r"\s+", " ", re.sub("[│╭╮╰╯─]", " ", text))


def check(bad: Bad, message: str, before: dict[str, tuple[int, int]], folder: Path) -> None:
    for part in (bad.thing, bad.value, bad.way_out):
        assert part in plain(message), f"{part!r} is not in: {message}"
    assert "Traceback" not in message
    assert listing(folder) == before
    cache = folder.parent / "cache"
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert bool(kept) == bad.leaves_tokens, kept


@pytest.mark.parametrize("bad", TABLE, ids=str)
def test_bad_input_is_refused_with_the_thing_the_value_and_the_way_out(
    bad: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make(bad, folder, monkeypatch)
    before = listing(folder)
    if isinstance(bad.attempt, str):
        program, _, arguments = command(bad)
        status: Any = None
        with suppress(SystemExit):
            try:
                status = program(arguments)
            except SystemExit as error:
                status = error.code
                raise
        message = capfd.readouterr().err
        assert status == 2, message
    else:
        with pytest.raises((Refused, ContractError)) as caught:
            bad.attempt()
        message = str(caught.value)
    check(bad, message, before, folder)


@pytest.mark.parametrize("bad", [bad for bad in TABLE if bad.name in AS_COMMANDS], ids=str)
def test_the_command_itself_ends_with_status_2_and_forks_nothing(
    bad: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(bad, folder, monkeypatch)
    before = listing(folder)
    watcher = folder.parent / "watcher"
    watcher.mkdir()
    forked = watcher / "forked"
    (watcher / "sitecustomize.py").write_text(
        f"import sys\nsys.addaudithook(lambda event, _: event == 'os.fork' and open({str(forked)!r}, 'w').close())\n"
    )
    source = Path(recipe.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{watcher}{os.pathsep}{source}"}
    _, module, arguments = command(bad)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert not forked.exists()
    check(bad, done.stderr, before, folder)


def test_the_table_has_cases_of_all_kinds_and_no_name_twice() -> None:
    assert len(TABLE) >= 40
    assert len({bad.name for bad in TABLE}) == len(TABLE)
    assert len(AS_COMMANDS & {bad.name for bad in TABLE}) == len(AS_COMMANDS)
    assert all(bad.thing + bad.value + bad.way_out for bad in TABLE)
