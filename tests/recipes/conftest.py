"""Fixtures of the tests of the whole program: a cache of tokens, a tiny model, and runs that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshtrain.recipes import llama
from tests.recipes import tiny
from tests.recipes.runs import flags


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_config(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str) -> Callable[..., Path]:
    """The directory of a run that never stopped, by its settings; made once."""
    made: dict[str, Path] = {}

    def run(**more: object) -> Path:
        key = repr(sorted(more.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MESHTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
                assert llama.main(flags(model, made[key], **more)) == 0
        return made[key]

    return run
