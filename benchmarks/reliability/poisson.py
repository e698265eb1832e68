"""A run among failures: ranks and hosts fail at random moments, and the run goes on by itself. How much of the time counted?

    python -m benchmarks.reliability.poisson                                  # 20 minutes, a failure every 60 s on average
    python -m benchmarks.reliability.poisson --minutes 3 --mean 30 --seed 7

The kinds of failures have the shares that Meta reports of Llama 3's 54 days ("The Llama 3 Herd of Models", 2024, table 5):
a rank killed (faulty GPU, memory, host), a rank aborted (software), a rank that hangs (network, watchdog), a host that is lost
with the launcher, and maintenance (SIGTERM). The launcher restarts its ranks; where it is gone itself, the command is given
again, as a batch system would.

Effective time is the sum of `step_seconds` over the steps that stayed (each is in metrics.jsonl once), as a share of the wall
time: noticing, starting again, steps made twice, and saves that hold training up are what it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = {"rank killed": 0.61, "rank aborted": 0.13, "rank hangs": 0.10, "host lost": 0.08, "maintenance": 0.08}
STEPS = 1_000_000


def command(out: Path, args: argparse.Namespace) -> list[str]:
    return [
        sys.executable, "-m", "meshtrain.recipes.llama", "--dp", str(args.dp), "--tp", str(args.tp), "--steps", str(STEPS),
        "--out", str(out), "--save-every", str(args.save_every), "--keep", "3", "--max-restarts", "1000", "--sample", "0",
        "--timeout", str(args.timeout), "--schedule", "constant", "--warmup", "10",
    ]  # fmt: skip


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def fail(kind: str, launcher: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Make something fail; whether there was anything to fail."""
    ranks = ranks_of(launcher.pid)
    if not ranks:
        return False
    if kind == "host lost":
        launcher.kill()
    elif kind == "maintenance":
        launcher.terminate()
    else:
        number = {"rank killed": signal.SIGKILL, "rank aborted": signal.SIGABRT, "rank hangs": signal.SIGSTOP}[kind]
        os.kill(chance.choice(ranks), number)
    return True


def steps_in(out: Path) -> list[dict[str, float]]:
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # the last line, while it is written
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--mean", type=float, default=60.0, help="seconds between failures, on average")
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds after which ranks give up waiting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="where the run is kept (default: the system's temporary folder)")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="meshtrain-poisson-", dir=args.dir))
    out, counts, starts = folder / "run", dict.fromkeys(KINDS, 0), 0
    log = open(folder / "log", "wb")  # noqa: SIM115 - lives as long as the process that writes to it
    launcher: subprocess.Popen[bytes] | None = None
    begin: float | None = None
    due = 0.0
    try:
        while begin is None or time.monotonic() - begin < 60 * args.minutes:
            if launcher is None or launcher.poll() is not None:
                if launcher is not None and launcher.returncode not in (130, -signal.SIGKILL):
                    raise SystemExit(f"the run ended with {launcher.returncode}; see {folder / 'log'}")
                launcher = subprocess.Popen(command(out, args), stdout=log, stderr=log)
                starts += 1
            if begin is None:
                if len(steps_in(out)) >= 2:  # the clock starts when the run does
                    begin, before = time.monotonic(), len(steps_in(out))
                    due = begin + chance.expovariate(1 / args.mean)
            elif time.monotonic() >= due:
                kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
                if fail(kind, launcher, chance):
                    counts[kind] += 1
                    print(f"{time.monotonic() - begin:7.1f} s  step {len(steps_in(out)):5}  {kind}", flush=True)
                    due = time.monotonic() + chance.expovariate(1 / args.mean)
            time.sleep(0.05)
        assert begin is not None
        wall = time.monotonic() - begin
        made = steps_in(out)
        assert [step["step"] for step in made] == list(range(1, len(made) + 1)), "a step is missing or doubled"
        effective = sum(step["step_seconds"] for step in made[before:]) / wall
        print(
            f"{sum(counts.values())} failures in {wall:.0f} s ({', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}), "
            f"{starts} commands, {len(made)} steps: effective time {100 * effective:.1f} %"
        )
    finally:
        if launcher is not None:
            launcher.kill()
            launcher.wait()
        log.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
