"""Single errors of the system that once were taken for something else. The whole sweep is benchmarks/reliability/faults.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmarks.reliability.common import check_whole, fill, plain, rest, steps
from benchmarks.reliability.group import on_mesh

from meshtrain.errors import MeshtrainError
from meshtrain.state import publish
from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.names import name_of
from meshtrain.state.saver import Saver
from tests.ranks import RankPool


@contextmanager
def failing(name: str, code: int, where: str, times: int = 10**9) -> Iterator[None]:
    """Calls of os.NAME whose first argument names a path with `where` in it fail, the first `times` times."""
    real: Callable[..., Any] = getattr(os, name)
    left = [times]

    def call(*args: Any, **named: Any) -> Any:
        what = args[0] if args else "."
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        if where in path and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    with mock.patch.object(os, name, call):
        yield


def saver(folder: Path) -> Saver:
    return Saver(folder, *plain(), keep=1, background=False)


def test_a_directory_that_cannot_be_listed_fails_the_save_rather_than_missing_in_the_manifest(tmp_path: Path) -> None:
    model, optimizer = plain()
    with failing("scandir", errno.EACCES, "/training", 1), pytest.raises(MeshtrainError, match="Permission denied"):
        save_checkpoint(model, optimizer, tmp_path / "step-00000001", step=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "pwrite"])
def test_an_error_of_a_write_names_the_file(tmp_path: Path, call: str) -> None:
    model, optimizer = plain()
    with failing(call, errno.EIO, "exp_avg_sq"), pytest.raises(MeshtrainError, match="Input/output.*exp_avg_sq"):
        save_checkpoint(model, optimizer, tmp_path / "step-00000001", step=1)


def test_what_could_not_be_removed_goes_with_the_next_save(tmp_path: Path) -> None:
    ours = saver(tmp_path)
    for step in (1, 2, 3):
        with failing("rmdir", errno.EIO, ".old-" if step == 2 else "\0"):
            ours.save(step, {"tag": 0})
        assert ours.failure() is None
        assert bool(rest(tmp_path)) == (step == 2)
    assert steps(tmp_path) == [3]


def test_a_place_that_cannot_be_looked_at_is_not_taken_for_a_free_one(tmp_path: Path) -> None:
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    with failing("lstat", errno.EIO, "out", 1), pytest.raises(OSError, match="Input/output"):
        publish.publish(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_text() == "out"


def test_ctrl_c_in_a_save_in_the_foreground_is_no_failure_of_the_save(tmp_path: Path) -> None:
    ours = saver(tmp_path)
    with mock.patch.object(os, "fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        ours.save(1, {"tag": 0})
    assert not ours.failed
    assert steps(tmp_path) == []


def save_where_rank_1_is_blind(folder: str) -> None:
    model, optimizer = on_mesh(1, 2)
    fill(model, optimizer, 4)
    blind = failing("stat", errno.EIO, ".tmp-", 1) if os.environ["RANK"] == "1" else failing("stat", 0, "\0")
    with blind:
        save_checkpoint(model, optimizer, folder, step=4, run={"tag": 4}, join_seconds=10)


def test_a_rank_that_cannot_look_for_the_folder_does_not_leave_the_others_waiting(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """What that rank holds then goes to rank 0, as where ranks share no file system."""
    ranks(2).run(save_where_rank_1_is_blind, str(tmp_path / name_of(4)), timeout=30)
    assert check_whole(tmp_path / name_of(4), *plain()) == 4
