"""Damage to the files of a checkpoint: is every single flipped bit noticed, and every file that is short, empty or mixed up?

python -m benchmarks.reliability.flips
python -m benchmarks.reliability.flips --rounds 500 --group 10

Each bit is flipped, the checkpoint is loaded (inspect_checkpoint, then load_checkpoint), and the bit is flipped back. The
error must be Damaged and name the file. Half the bits are drawn over all bytes, half over the files, so that small files
have their share. With `--group`, as many flips are loaded by two ranks, which must all refuse.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.reliability.common import Lost, Tally, check_whole, differing, fill, parser, plain, warm_up
from benchmarks.reliability.group import Group, mesh_of, on_mesh

from meshtrain.errors import Damaged, MeshtrainError
from meshtrain.state.checkpoint import inspect_checkpoint, save_checkpoint
from meshtrain.state.checkpoints import newest_complete
from meshtrain.state.names import name_of
from meshtrain.state.restore import load_checkpoint

TAG = 41


class Checked:
    """Two checkpoints, steps 1 and 2, and a model to load them into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.optimizer = plain()
        for step in (1, 2):
            fill(self.model, self.optimizer, TAG + step)
            tokenizer = folder / "tokenizer"
            tokenizer.mkdir(exist_ok=True)
            (tokenizer / "tokenizer.json").write_text("{}")
            (tokenizer / "tokenizer_config.json").write_text(f'{{"step": {step}}}')
            self.model.config = {"model_type": "tiny", "step": step}  # type: ignore[assignment]
            save_checkpoint(
                self.model, self.optimizer, self.place(step), step=step, run={"tag": TAG + step}, tokenizer=tokenizer,
                generation_config={"step": step}, max_shard_size=1500,
            )  # fmt: skip
        self.path = self.place(2)
        self.files = sorted(each for each in self.path.rglob("*") if each.is_file())
        self.seconds = {"inspect": 0.0, "load": 0.0}
        self.found = {"inspect": 0, "load": 0}
        self.intact()

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / name_of(step)

    def intact(self) -> None:
        """Raise Lost unless it loads with the right values."""
        if check_whole(self.path, self.model, self.optimizer) != TAG + 2:
            raise Lost("the wrong checkpoint")

    def noticed(self, file: Path, mixed_up: bool = False) -> str:
        """Load; return who noticed that a file is damaged. Raises Lost.

        mixed_up: the manifest is another one, so that any file may be named.
        """
        start = time.perf_counter()
        try:
            inspect_checkpoint(self.path)
            way = "load"
            load_checkpoint(self.model, self.optimizer, self.path)
        except Damaged as error:
            way = "inspect" if "sum to" not in str(error) else "load"
            if file.name not in str(error) and not mixed_up:
                raise Lost(f"the message does not name {file.name}: {error}") from error
        except MeshtrainError as error:
            raise Lost(f"{type(error).__name__} and not Damaged: {error}") from error
        else:
            same = "the right" if not differing(self.model, self.optimizer, TAG + 2) else "other"
            raise Lost(f"not noticed; {same} values were loaded")
        self.seconds[way] += time.perf_counter() - start
        self.found[way] += 1
        return way


def flip(file: Path, bit: int) -> None:
    """Change one bit."""
    with open(file, "r+b", buffering=0) as handle:
        byte = os.pread(handle.fileno(), 1, bit // 8)[0] ^ 1 << bit % 8
        os.pwrite(handle.fileno(), bytes([byte]), bit // 8)


def drawn(files: list[Path], chance: random.Random) -> tuple[Path, int]:
    """A file and a bit of it."""
    weights = [file.stat().st_size for file in files] if chance.random() < 0.5 else None
    file = chance.choices(files, weights)[0]
    return file, chance.randrange(8 * file.stat().st_size)


def flips(checked: Checked, chance: random.Random, tally: Tally) -> None:
    """Single bits."""
    for number in range(tally.total):
        file, bit = drawn(checked.files, chance)
        flip(file, bit)
        try:
            tally.add(f"noticed by {checked.noticed(file)}")
        except Lost as error:
            tally.lose(f"bit {bit} of {file.name}: {error}")
        finally:
            flip(file, bit)
        if number % 500 == 0:
            checked.intact()
    checked.intact()


def cruder(checked: Checked, chance: random.Random, tally: Tally) -> None:
    """Whole files."""
    other = {file: checked.place(1) / file.relative_to(checked.path) for file in checked.files}

    def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        def rewrite(file: Path) -> None:
            file.write_bytes(change(file.read_bytes()))

        return rewrite

    def into_directory(file: Path) -> None:
        file.unlink()
        file.mkdir()

    def copied(file: Path) -> None:
        shutil.copyfile(other[file], file)

    def block(content: bytes) -> bytes:
        start = chance.randrange(len(content))
        return content[:start] + bytes(min(64, len(content) - start)) + content[start + 64 :]

    ways: list[tuple[str, Callable[[Path], None]]] = [
        ("empty", rewritten(lambda content: b"")),
        ("truncated", rewritten(lambda content: content[: chance.randrange(len(content))])),
        ("one byte short", rewritten(lambda content: content[:-1])),
        ("one byte more", rewritten(lambda content: content + b"\0")),
        ("only zeros", rewritten(lambda content: bytes(len(content)))),
        ("zeros in a block", rewritten(block)),
        ("gone", Path.unlink),
        ("of another step", copied),
        ("a directory", into_directory),
    ]
    for (what, damage), file in itertools.product(ways, checked.files):
        _one(checked, [file], what, damage, tally)
    for first, second in itertools.combinations(checked.files, 2):

        def swap(file: Path, second: Path = second) -> None:
            own = file.read_bytes()
            file.write_bytes(second.read_bytes())
            second.write_bytes(own)

        _one(checked, [first, second], "swapped", swap, tally)
    shutil.move(checked.path, checked.place(3))
    found, skipped = newest_complete(checked.folder)
    shutil.move(checked.place(3), checked.path)
    if found is None or found.step != 1 or "renamed" not in skipped[0][1]:
        tally.lose("a checkpoint under the name of another step was taken")
    tally.add("renamed, noticed")


def _one(checked: Checked, files: list[Path], what: str, damage: Callable[[Path], None], tally: Tally) -> None:
    kept = {file: file.read_bytes() for file in files}
    damage(files[0])
    try:
        if all(file.is_file() and file.read_bytes() == content for file, content in kept.items()):
            tally.add("no change")
            return
        with suppress(Lost):  # of two files it may name either
            tally.add(f"{what}, noticed by {checked.noticed(files[-1])}")
            return
        other_manifest = what == "of another step" and files[0].name == "manifest.json"
        tally.add(f"{what}, noticed by {checked.noticed(files[0], other_manifest)}")
    except Lost as error:
        tally.lose(f"{files[0].name}, {what}: {error}")
    finally:
        for file, content in kept.items():
            if file.is_dir():
                file.rmdir()
            file.write_bytes(content)


def serve(rank: int, pipe: Connection, size: int) -> None:
    """Be a rank that loads: path -> what the error said, or that there was none."""
    model, optimizer = on_mesh(*mesh_of(size))
    pipe.send("ready")
    while True:
        (path,) = pipe.recv()
        try:
            load_checkpoint(model, optimizer, path, join_seconds=10)
            pipe.send("no error")
        except Damaged as error:
            pipe.send(f"damaged: {error}")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def by_group(checked: Checked, chance: random.Random, tally: Tally) -> None:
    """Single bits, loaded by two ranks."""
    with Group(2, serve, 2) as group:
        group.answers()
        for _ in range(tally.total):
            file, bit = drawn(checked.files, chance)
            flip(file, bit)
            try:
                said = group.ask(checked.path)
            finally:
                flip(file, bit)
            if all(text and text.startswith("damaged") and file.name in text for text in said):
                tally.add("noticed by all ranks")
            else:
                tally.lose(f"bit {bit} of {file.name}: {said}")
        if (said := group.ask(checked.path)) != ["no error"] * 2:
            tally.lose(f"the intact checkpoint is refused: {said}")


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    chosen = parser(__doc__, rounds=10_000, group=200).parse_args(argv)
    warm_up()
    chance, status = random.Random(chosen.seed), 0
    with tempfile.TemporaryDirectory(prefix="meshtrain-flips-", dir=chosen.dir) as home:
        checked = Checked(Path(home))
        for name, rounds, body in (
            ("bits", chosen.rounds, flips),
            ("files", 0, cruder),
            ("bits, 2 ranks", chosen.group, by_group),
        ):
            tally = Tally(f"flips {name}", rounds)
            body(checked, chance, tally)
            status |= tally.close()
        size = sum(file.stat().st_size for file in checked.files)
        each = ", ".join(f"{way} {1000 * checked.seconds[way] / max(1, n):.1f} ms" for way, n in checked.found.items())
        print(f"flips: {len(checked.files)} files, {size} bytes; to notice one takes on average: {each}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
