"""Seconds from launch to the end of step 1 with 8 ranks: our own launcher against torchrun, on the same program, in
alternation. The end of step 1 is when the first line of metrics.jsonl is written.

    python benchmarks/startup.py
    python benchmarks/startup.py --dp 2 --tp 2 --rounds 5 -- --model llama3.2-1b   # after "--": more flags of the program
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = ["-m", "meshtrain.recipes.llama"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]


def seconds_to_step_1(command: list[str], folder: Path, cache: Path) -> tuple[float, float]:
    """Run the command with its output in `folder`; return the seconds to the end of step 1 and to its exit."""
    environment = {**os.environ, "MESHTRAIN_CACHE": str(cache)}
    with open(folder.with_suffix(".log"), "w") as log:
        start = time.time()
        done = subprocess.run(
            [sys.executable, *command, "--out", str(folder)], env=environment, stdout=log, stderr=log, timeout=600
        )
        end = time.time()
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}:\n{folder.with_suffix('.log').read_text()}"
        )
    # Nothing is written to it after its only line.
    return (folder / "metrics.jsonl").stat().st_mtime - start, end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("more", nargs="*", help="further flags of the program, after --")
    args = parser.parse_args()
    program = [*PROGRAM, "--dp", str(args.dp), "--tp", str(args.tp), "--steps", "1", "--sample", "0", *args.more]
    first: dict[str, list[float]] = {"meshtrain": [], "torchrun": []}
    whole: dict[str, list[float]] = {"meshtrain": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="meshtrain-bench-") as folder:
        # Not counted: it puts the tokens and the libraries' files into their caches.
        seconds_to_step_1(program, Path(folder, "warm"), Path(folder, "cache"))
        for turn in range(args.rounds):
            for name, prefix in (("meshtrain", []), ("torchrun", torchrun(args.dp * args.tp))):
                step, end = seconds_to_step_1([*prefix, *program], Path(folder, f"{name}{turn}"), Path(folder, "cache"))
                first[name].append(step)
                whole[name].append(end)
    print(
        f"dp {args.dp} x tp {args.tp}, {args.rounds} rounds, {os.cpu_count()} cores: seconds to the end of step 1 (to the exit)"
    )
    for name in first:
        runs = ", ".join(f"{step:.1f} ({end:.1f})" for step, end in zip(first[name], whole[name], strict=True))
        print(
            f"  {name:<10} median {statistics.median(first[name]):.2f} ({statistics.median(whole[name]):.2f})   [{runs}]"
        )
    ratio = statistics.median(first["meshtrain"]) / statistics.median(first["torchrun"])
    print(f"  ratio      {ratio:.3f}")


if __name__ == "__main__":
    main()
