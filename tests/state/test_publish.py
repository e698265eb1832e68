"""A directory appears complete or not at all, whatever fails on the way."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from meshtrain.state import publish
from meshtrain.state.publish import check_space, temporary_directory
from meshtrain.state.publish import publish as put


def make(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(content)
    return folder


@pytest.mark.parametrize("atomic", [True, False])
def test_an_existing_directory_is_swapped_and_the_old_one_removed(tmp_path: Path, atomic: bool) -> None:
    old, new = make(tmp_path / "out", "old"), make(tmp_path / ".new", "new")
    if atomic:
        put(new, old)
    else:
        with mock.patch.object(publish, "_exchange", return_value=False):
            put(new, old)
    assert (tmp_path / "out/model.safetensors").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_without_an_atomic_swap_a_failed_rename_puts_the_old_directory_back(tmp_path: Path) -> None:
    old, new = make(tmp_path / "out", "old"), make(tmp_path / ".new", "new")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source == new:
            raise OSError(5, "Input/output error")
        real(source, target)

    with (
        mock.patch.object(publish, "_exchange", return_value=False),
        mock.patch.object(os, "rename", rename),
        pytest.raises(OSError, match="Input/output"),
    ):
        put(new, old)
    assert (tmp_path / "out/model.safetensors").read_text() == "old"


def test_everything_is_durable_before_the_name_and_the_name_after(tmp_path: Path) -> None:
    new = make(tmp_path / ".new", "new")
    order = []
    real_rename, real_fsync = os.rename, os.fsync

    def fsync(descriptor: int) -> None:
        order.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        order.append(("rename", str(target)))
        real_rename(source, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "rename", rename):
        publish.fsync_files(new)
        put(new, tmp_path / "out")
    assert order[0] == ("fsync", str(new / "model.safetensors"))
    assert order[-3:] == [("fsync", str(new)), ("rename", str(tmp_path / "out")), ("fsync", str(tmp_path))]


def test_a_failure_leaves_neither_the_temporary_directory_nor_made_parents(tmp_path: Path) -> None:
    def fail() -> None:
        with temporary_directory(tmp_path / "a/b/out") as folder:
            assert folder.parent == tmp_path / "a/b"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == []


def test_parents_that_were_made_stay_when_the_directory_is_there(tmp_path: Path) -> None:
    with temporary_directory(tmp_path / "a/out") as folder:
        put(folder, tmp_path / "a/out")
    assert os.listdir(tmp_path / "a") == ["out"]


def test_a_full_file_system_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"bytes are needed and .* are free"):
        check_space(tmp_path, 2**60)
