"""What the README and the guides show is run: its Python as it stands, its commands as far as they need no cluster."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.recipes.runfile import read_settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]
TRAINING = [line for line in COMMANDS if "-m meshtrain.recipes.llama" in line]


def run(arguments: list[str], folder: Path, seconds: float) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MESHTRAIN_CACHE": str(folder / "cache")}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_python_runs_as_it_stands(index: int, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(blocks("python")[index])
    shown = run([sys.executable, str(file)], tmp_path, 220)
    if "save_pretrained" in blocks("python")[index]:
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", shown)]
        assert len(losses) == 20
        assert losses[-1] < losses[0] - 1
        assert (tmp_path / "my-model" / "model.safetensors").exists()
    else:
        assert "lm_head" in shown


@pytest.mark.parametrize("line", TRAINING)
def test_training_commands_have_flags_that_exist(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line.split("-m meshtrain.recipes.llama", 1)[1])
    settings = read_settings(arguments, program="program", description="")
    assert all(value in map(str, dict(settings.items()).values()) for value in arguments if value.isdecimal())


def test_make_targets_exist() -> None:
    for target in set(re.findall(r"\bmake ([\w-]+)", README)):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, timeout=60)


GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: f"{guide.parent.name}-{guide.name}")
def test_links_lead_to_files(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", guide.read_text(encoding="utf-8")):
        assert (guide.parent / target).exists(), target


@pytest.mark.parametrize("guide", sorted((ROOT / "docs").glob("*.md")), ids=lambda guide: guide.name)
def test_python_of_the_guides_runs(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block, guide.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_default_run_learns_and_its_export_is_exported_again(tmp_path: Path) -> None:
    command = shlex.split(TRAINING[0])
    assert command[:2] == ["python", "-m"]
    shown = run([sys.executable, *command[1:], "--out", "runs/mine"], tmp_path, 380)
    first, last = map(float, re.search(r"first loss ([\d.]+), last loss ([\d.]+)", shown).groups())  # type: ignore[union-attr]
    assert last < first - 2.0
    export = shlex.split(next(line for line in COMMANDS if "-m meshtrain export" in line))
    run([sys.executable, *export[1:]], tmp_path, 60)
    assert (tmp_path / export[-3] / "model.safetensors").stat().st_size < 0.6 * (
        tmp_path / export[-4] / "model.safetensors"
    ).stat().st_size
