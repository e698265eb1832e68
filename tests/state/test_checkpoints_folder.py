"""The folder of checkpoints: which is the newest that counts, which ones go, and what is swept away."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from meshtrain.errors import Damaged, Refused
from meshtrain.state.checkpoint import inspect_checkpoint, save_checkpoint
from meshtrain.state.checkpoints import check_folder, move_latest, newest_complete, prune, sweep
from meshtrain.state.names import checkpoints_in, name_of


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def write(folder: Path, *steps: int) -> None:
    """Checkpoints after these steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step in steps:
        save_checkpoint(model, optimizer, folder / name_of(step), step=step)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def dirs(folder: Path, *steps: int) -> None:
    """Directories with the names of checkpoints."""
    for step in steps:
        (folder / name_of(step)).mkdir()
        (folder / name_of(step) / "file").write_text("content")


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path: Path) -> None:
    dirs(tmp_path, 9, 10, 123_456_789_012)
    for name in ("step-1", "step-00000011.tmp", ".step-00000012.tmp-0123456789abcdef", "step-0000001x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert checkpoints_in(tmp_path) == [(step, tmp_path / name_of(step)) for step in (123_456_789_012, 10, 9)]
    assert checkpoints_in(tmp_path / "nowhere") == checkpoints_in(tmp_path / "step-00000099") == []


def test_latest_is_moved_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    move_latest(tmp_path, "step-00000001")
    move_latest(tmp_path, "step-00000002")
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    assert names(tmp_path) == ["latest"]


def test_a_latest_that_cannot_be_moved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_latest(tmp_path, "step-00000001")

    def broken(*paths: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(OSError, match="Input/output error"):
        move_latest(tmp_path, "step-00000002")
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    assert names(tmp_path) == ["latest"]


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"keep": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 2}, [5, 6]),
        ({"keep": 1}, [6]),
        ({"keep": 9}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "milestone": 2}, [2, 4, 6]),
        ({"keep": 1, "milestone": 3}, [3, 6]),
        ({"keep": 2, "milestone": 1}, [1, 2, 3, 4, 5, 6]),
        # What is newer than the one just written is not of this run's course: it neither counts nor goes.
        ({"keep": 1, "protect": 4}, [4, 5, 6]),
        ({"keep": 2, "protect": 4, "milestone": 5}, [3, 4, 5, 6]),
    ],
)
def test_old_ones_go_and_milestones_stay(tmp_path: Path, how: dict[str, int], left: list[int]) -> None:
    dirs(tmp_path, 1, 2, 3, 4, 5, 6)
    removed = prune(tmp_path, **how)  # type: ignore[arg-type]
    assert names(tmp_path) == [name_of(step) for step in left]
    assert sorted(removed) == [tmp_path / name_of(step) for step in range(1, 7) if step not in left]


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs(tmp_path, 1, 2)

    class Killed(BaseException):
        pass

    def killed(*arguments: object, **options: object) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        prune(tmp_path, 1)
    assert checkpoints_in(tmp_path) == [(2, tmp_path / name_of(2))]
    monkeypatch.undo()
    sweep(tmp_path)
    assert names(tmp_path) == [name_of(2)]


def test_what_was_under_way_is_swept_and_nothing_else(tmp_path: Path) -> None:
    dirs(tmp_path, 5)
    tag = "0123456789abcdef"
    for name in (f".step-00000007.tmp-{tag}", f".step-00000005.old-{tag}"):
        (tmp_path / name / "training").mkdir(parents=True)
    (tmp_path / f".latest-{tag}").write_text("step")
    (tmp_path / f".step-00000009.tmp-{tag}").symlink_to(tmp_path / name_of(5))
    mine = [".step-00000007.tmp-mine", ".hidden", f"step-00000007.tmp-{tag}", f".other.tmp-{tag}"]
    for name in mine:
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == sorted([name_of(5), *mine])
    assert (tmp_path / name_of(5) / "file").read_text() == "content", "a link is removed, not what it leads to"
    sweep(tmp_path / "nowhere")


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_folder(tmp_path)
    check_folder(tmp_path / "nowhere")
    with pytest.raises(Refused, match="is not a directory"):
        check_folder(tmp_path / "file")


# The newest that is complete.


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def flip(name: str, position: int = -1) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray((path / name).read_bytes())
        raw[position] ^= 1
        (path / name).write_bytes(raw)

    return damage


def gone(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (cut("model.safetensors"), r"model\.safetensors: has \d+ bytes where \d+ were written"),
    "truncated moments": (cut("training/exp_avg.safetensors"), r"exp_avg\.safetensors: has"),
    "no weights": (gone("model.safetensors"), r"model\.safetensors: is missing"),
    "no moments": (gone("training/exp_avg_sq.safetensors"), r"exp_avg_sq\.safetensors: is missing"),
    "no state": (gone("training/state.json"), r"state\.json: is missing"),
    "no generators": (gone("training/generators.safetensors"), r"generators\.safetensors: is missing"),
    "no manifest": (gone("training/manifest.json"), r"manifest\.json is missing"),
    "no training": (lambda path: shutil.rmtree(path / "training"), r"has no training/manifest\.json"),
    "empty": (emptied, "no checkpoint"),
    "flipped header": (flip("model.safetensors", 20), r"model\.safetensors: its header sums to"),
    "flipped length": (flip("model.safetensors", 7), r"model\.safetensors: its header"),
    "flipped state": (flip("training/state.json"), r"state\.json: its content sums to"),
    "flipped generators": (flip("training/generators.safetensors"), r"generators\.safetensors: its content sums"),
    "flipped manifest": (flip("training/manifest.json"), r"manifest\.json: says"),
    "cut manifest": (cut("training/manifest.json"), r"manifest\.json: says"),
    "a folder for a file": (lambda path: (gone("training/state.json")(path), (path / "training/state.json").mkdir()), "state"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    folder = tmp_path / "checkpoints"
    write(folder, 1, 2)
    damage(folder / name_of(2))
    found, skipped = newest_complete(folder)
    assert found is not None
    assert (found.step, found.path) == (1, folder / name_of(1))
    ((path, why),) = skipped
    assert path == folder / name_of(2)
    assert name_of(2) in why
    assert re.search(reason, why), why
    with pytest.raises(Refused):
        inspect_checkpoint(folder / name_of(2))


def test_without_an_intact_one_all_reasons_are_told(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for step in (1, 2):
        cut("model.safetensors")(tmp_path / name_of(step))
    found, skipped = newest_complete(tmp_path)
    assert found is None
    assert [path.name for path, _ in skipped] == [name_of(2), name_of(1)]
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_only_those_before_a_step(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    found, skipped = newest_complete(tmp_path, before=3)
    assert (found.step if found else None, skipped) == (2, [])
    assert newest_complete(tmp_path, before=1) == (None, [])


def test_a_renamed_one_is_not_taken_for_another_step(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / name_of(1)).rename(tmp_path / name_of(9))
    found, ((_, why),) = newest_complete(tmp_path)
    assert found is not None
    assert found.step == 2
    assert "was written after step 1" in why


def rewritten(path: Path, name: str, **changes: object) -> None:
    """The file with other values, and a manifest that agrees: as another version of the program would write it."""
    content = {**json.loads((path / name).read_text()), **changes}
    if name == "training/manifest.json":
        content.pop("crc32")
    else:
        raw = json.dumps(content).encode()
        (path / name).write_bytes(raw)
        content = json.loads((path / "training/manifest.json").read_text())
        content.pop("crc32")
        content["files"][name] = {"bytes": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}
    rest = b" " + json.dumps(content).lstrip("{").encode()
    (path / "training/manifest.json").write_bytes(b'{"crc32": "' + f"{zlib.crc32(rest):08x}".encode() + b'",' + rest)


@pytest.mark.parametrize("name", ["training/manifest.json", "training/state.json"])
def test_one_of_a_newer_version_is_no_reason_to_go_back(tmp_path: Path, name: str) -> None:
    """It is intact. To go on from an older one would throw work away that a newer program can read."""
    write(tmp_path, 1, 2)
    rewritten(tmp_path / name_of(2), name, version=2)
    with pytest.raises(Refused, match="with the version of meshtrain that wrote it") as error:
        newest_complete(tmp_path)
    assert not isinstance(error.value, Damaged)


def test_one_that_the_disk_cannot_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 2)
    real = os.open

    def broken(path: object, *arguments: int, **options: int) -> int:
        if f"{name_of(2)}/model" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", broken)
    found, ((_, why),) = newest_complete(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "Input/output error" in why
