"""The core runs with its five packages alone: torch does not require numpy, so neither may meshtrain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120)
def test_a_run_on_four_ranks_needs_no_numpy(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('numpy', 'transformers', 'tokenizers', 'pyarrow'):\n    sys.modules[name] = None\n"
    )
    arguments = [
        "--dp",
        "2",
        "--tp",
        "2",
        "--steps",
        "2",
        "--seq-len",
        "32",
        "--global-batch",
        "4",
        "--sample",
        "8",
        "--out",
        "run",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain.recipes.llama", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "MESHTRAIN_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr
    assert "pip install transformers" in done.stdout
    assert (tmp_path / "run/export/model.safetensors").exists()
