"""Settings from defaults, run files and the command line: precedence, types, and the nearest name for a mistyped one."""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshtrain.errors import Refused
from meshtrain.recipes.runfile import FLAGS, as_toml, read_run_file, read_settings
from meshtrain.recipes.settings import FIELDS, Settings, flag_of

ROOT = Path(__file__).resolve().parent.parent.parent


def read(*arguments: str) -> Settings:
    return read_settings(arguments, program="program", description="")


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def test_command_line_wins_over_run_file_wins_over_defaults(file) -> None:
    path = file("seq-len = 77\nsteps = 11\nloss-parallel = false\nlr = 1\n")
    settings = read("--steps", "12", "--config", path, "--no-sequence-parallel", "--max-norm", "inf")
    assert (settings.data.seq_len, settings.training.steps, settings.data.global_batch) == (77, 12, 16)
    assert (settings.mesh.loss_parallel, settings.mesh.sequence_parallel) == (False, False)
    assert settings.training.max_norm == float("inf")
    assert (settings.training.lr, type(settings.training.lr)) == (1.0, float)
    assert read(f"--config={path}", "--loss-parallel").mesh.loss_parallel is True


def test_settings_round_trip_through_a_run_file(file) -> None:
    settings = read(
        "--dp", "4", "--out", 'a "quoted" path', "--no-loss-parallel", "--max-norm", "inf", "--lr", "2.5e-5"
    )
    assert read_run_file(file(as_toml(settings))) == settings


def test_the_default_run_is_the_debug_run_file() -> None:
    assert read_run_file(ROOT / "recipes" / "debug.toml", Settings()) == dataclasses.replace(
        Settings(), model=dataclasses.replace(Settings().model, model="debug")
    )
    written = tomllib.loads((ROOT / "recipes" / "debug.toml").read_text())
    left_out = {name for name, value in Settings().items() if value is None} - {"model"}
    assert set(written) == {name for name, _ in Settings().items()} - left_out


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_every_run_file_that_ships_is_read(path: Path) -> None:
    assert read("--config", str(path)).mesh.dp >= 1


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("steps = 3\n\nseqlen = 4\n", 3, ["'seqlen'", "did you mean seq-len"]),
        ("# lr = 3\nlrr = 4\n", 2, ["'lrr'", "did you mean lr"]),
        ("config = 'other.toml'\n", 1, ["'config'", "--help"]),
        ("\nseq-len = '4'\n", 2, ["seq-len", "'4'", "a whole number"]),
        ("dtype = 'fp8'\n", 1, ["'fp8'", "'bf16'"]),
        ("lr = true\n", 1, ["lr is True", "a number"]),
        ("dp = 4.0\n", 1, ["dp is 4.0", "a whole number"]),
        ("loss-parallel = 1\n", 1, ["loss-parallel is 1", "true or false"]),
        ("data = 3\n", 1, ["data is 3", "a string"]),
        ("lr = 1\n[mesh]\ndp = 2\n", 2, ["[mesh]", "flat"]),
        ("seq-len = 3\nseq_len = 4\n", 2, ["twice"]),
    ],
)
def test_a_bad_key_or_value_is_refused_with_its_line(file, text: str, line: int, words: list[str]) -> None:
    path = file(text)
    with pytest.raises(Refused) as refusal:
        read("--config", path)
    assert str(refusal.value).startswith(f"{path}, line {line}: ")
    assert all(word in str(refusal.value) for word in words)


def test_a_run_file_that_is_absent_or_not_toml_is_refused(file, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"absent.toml: cannot be read .No such file"):
        read("--config", str(tmp_path / "absent.toml"))
    with pytest.raises(Refused, match=r"is not a TOML file: .*line 2"):
        read("--config", file("dp = 3\ntp 4\n"))


def test_every_flag_with_one_letter_wrong_gets_the_right_name() -> None:
    for flag in FLAGS:
        for position in range(len(flag)):
            typos = {
                flag[:position] + flag[position + 1 :],
                flag[:position] + "x" + flag[position + 1 :],
                flag[:position] + "x" + flag[position:],
            }
            for typo in typos - {""}:
                if typo in FLAGS:
                    continue
                with pytest.raises(Refused) as refusal:
                    read(f"--{typo}", "1")
                message = str(refusal.value)
                assert f"unknown flag --{typo}; did you mean --" in message
                if len(flag) > 4:
                    assert f"did you mean --{flag}?" in message, typo


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-dp"], ["--no-dp", "--dp"]),
        (["-dp", "4"], ["-dp", "did you mean --dp"]),
        (["4"], ["'4' stands alone"]),
        (["--dp", "4", "2"], ["'2' stands alone"]),
        (["--loss-parallel", "false"], ["'false' stands alone"]),
        (["--", "x"], ["takes flags only"]),
        (["--save-every-step", "10"], ["unknown flag --save-every-step", "did you mean --save-every?"]),
        (["--restart"], ["unknown flag --restart"]),
        (["--elastic", "true"], ["'true' stands alone"]),
    ],
)
def test_what_the_command_line_does_not_know_is_refused(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(Refused) as refusal:
        read(*arguments)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dp", "x"], ["--dp", "'x'"]),
        (["--dtype", "fp8"], ["fp8", "bf16"]),
        (["--steps"], ["--steps"]),
        (["--resume"], ["--resume"]),
        (["--on-save-error", "ignore"], ["ignore", "warn"]),
    ],
)
def test_a_bad_value_ends_with_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(*arguments)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in words)


def test_help_lists_every_flag_once_and_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert f"--{flag_of(name)} " in shown or f"--{flag_of(name)}," in shown
    for group in ("mesh", "model", "data", "training", "checkpoint", "output"):
        assert f"{group} options" in shown


def test_reading_settings_does_not_import_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('meshtrain'); package.__path__ = ['src/meshtrain'];"
        "sys.modules['meshtrain'] = package; import meshtrain.recipes.runfile; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
