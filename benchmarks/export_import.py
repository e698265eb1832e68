"""Time, bytes and memory of exporting and importing a 0.5 GB model on a mesh, beside two yardsticks, in alternation:
one process that writes and fsyncs the same bytes, and torch's distributed checkpoint writer for Hugging Face files.

    python benchmarks/export_import.py                            # 2x2 and 4x2, in the system's temporary folder
    python benchmarks/export_import.py --dir /dev/shm --rounds 3  # on another file system

Linux only: bytes and memory are what the kernel counts for each rank (/proc/self/io, VmHWM).
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from meshtrain import init_mesh, load_pretrained, parallelize, save_pretrained
from meshtrain.launch import launch, preload
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, state_of

CHUNK = 16 * 2**20
MIB = 2**20


def config(layers: int) -> LlamaConfig:
    """5 layers make 0.52 GB of float32."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def moved(field: str) -> int:
    """Bytes that this process has read (rchar) or written (wchar) through system calls."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def over_ranks(value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> float:
    """The greatest value (or the sum) over all ranks."""
    result = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(result, how)
    return result.item()


def timed(work: Callable[[], object]) -> float:
    """Seconds from when all ranks begin until the last one is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return over_ranks(time.perf_counter() - start)


def timed_with_memory(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds as `timed`, and the MiB by which the resident memory of any rank rose at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
    before = status("VmRSS")
    seconds = timed(work)
    return seconds, over_ranks((status("VmHWM") - before) / MIB)


def write_alone(path: Path, nbytes: int, data: bytes) -> None:
    """One process writes and fsyncs: rank 0, while the others wait."""
    if dist.get_rank() != 0:
        return
    with open(path, "wb", buffering=0) as file:
        left = nbytes
        while left:
            left -= file.write(memoryview(data)[: min(len(data), left)])
        os.fsync(file.fileno())


def write_with_torch(model: torch.nn.Module, path: Path) -> None:
    """torch's own way to a Hugging Face directory from a sharded model: write shards, then consolidate them."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    state = model.state_dict()
    writer = HuggingFaceStorageWriter(
        path=str(path), save_distributed=True, fqn_to_index_mapping=dict.fromkeys(state, 1), enable_consolidation=True
    )
    save(state, storage_writer=writer)
    dist.barrier()


def measure(dp: int, tp: int, layers: int, rounds: int, folder: str) -> None:
    """On every rank: the three writers in turn, then the reader; rank 0 prints."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    mesh = init_mesh(dp, tp, "cpu")
    with torch.device("meta"):
        model = Llama(config(layers))
    parallelize(model, mesh, parallel_plan())
    initialise(model, seed=0)
    own = sum(shard.nbytes for shard in state_of(model).local_shards().values())
    total = sum(layout.nbytes for layout in state_of(model).layouts)
    data = os.urandom(CHUNK) if dist.get_rank() == 0 else b""
    root = Path(folder)

    def settle(*names: str) -> None:
        """Remove what was written, and let the file system come to rest, so that nobody pays for another."""
        dist.barrier()
        if dist.get_rank() == 0:
            for name in names:
                shutil.rmtree(root / name, ignore_errors=True)
            os.sync()
        dist.barrier()

    times: dict[str, list[float]] = {
        name: [] for name in ("meshtrain", "one process", "torch", "torch, synced", "import")
    }
    save_memory = load_memory = written = read = 0.0
    for _ in range(rounds):
        settle("ours")
        before = moved("wchar")
        seconds, memory = timed_with_memory(lambda: save_pretrained(model, root / "ours"))
        written = max(written, over_ranks(moved("wchar") - before, dist.ReduceOp.SUM) / total)
        times["meshtrain"].append(seconds)
        save_memory = max(save_memory, memory)

        settle()
        times["one process"].append(timed(lambda: write_alone(root / "raw", total, data)))
        if dist.get_rank() == 0:
            (root / "raw").unlink()

        settle()
        times["torch"].append(timed(lambda: write_with_torch(model, root / "torch")))
        times["torch, synced"].append(times["torch"][-1] + timed(lambda: dist.get_rank() == 0 and os.sync()))
        settle("torch")

        before = moved("rchar")
        seconds, memory = timed_with_memory(lambda: load_pretrained(model, root / "ours"))
        read = max(read, over_ranks((moved("rchar") - before) / own))
        times["import"].append(seconds)
        load_memory = max(load_memory, memory)

    on_disk = sum(file.stat().st_size for file in (root / "ours").glob("*.safetensors"))
    settle("ours")
    if dist.get_rank() != 0:
        return
    median = {name: statistics.median(found) for name, found in times.items()}
    print(f"{dp}x{tp}, {total / 1e9:.3f} GB, {rounds} rounds, in {folder}")
    for name, found in times.items():
        print(f"  {name:<14} median {median[name]:.2f} s   ({', '.join(f'{seconds:.2f}' for seconds in found)})")
    print(f"  export / one process   {median['meshtrain'] / median['one process']:.2f}")
    print(
        f"  torch / export         {median['torch'] / median['meshtrain']:.2f}   (synced {median['torch, synced'] / median['meshtrain']:.2f})"
    )
    print(
        f"  bytes: written {written:.4f} of the model, on disk {on_disk / total:.4f}; read at most {read:.4f} of a rank's own"
    )
    print(f"  extra memory: export {save_memory:.1f} MiB, import {load_memory:.1f} MiB on any rank", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=["2x2", "4x2"])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", default=None, help="folder on the file system to measure (default: the temporary folder)"
    )
    args = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="meshtrain-bench-") as folder:
        for mesh in args.meshes:
            dp, tp = map(int, mesh.split("x"))
            if launch(measure, (dp, tp, args.layers, args.rounds, folder), world_size=dp * tp, device="cpu"):
                raise SystemExit(1)


if __name__ == "__main__":
    main()
