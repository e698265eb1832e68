"""The state of torch's random generators of every rank, in one safetensors file: not needed by what meshtrain draws itself,
which is keyed (initial weights, order of the data, nn.Dropout), but by whatever else a model draws.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from meshtrain.state.header import TensorInfo, make_header, open_regular, read_header
from meshtrain.state.names import GENERATORS
from meshtrain.state.team import Team

_DEVICES = ("cpu", "cuda")


def own_generators() -> dict[str, bytes]:
    """Device -> the state of this rank's generator there."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: bytes(state.tolist()) for device, state in states.items()}


def generators_file(own: Mapping[str, bytes], team: Team) -> bytes:
    """The content of the file with every rank's states. Collective."""
    states = {
        f"{device}.{rank:05}": state
        for device in _DEVICES
        for rank, state in enumerate(team.gather(own.get(device, b"")))
        if state
    }
    head, starts = make_header([TensorInfo(key, "U8", (len(state),)) for key, state in states.items()])
    return head + b"".join(states[key] for key in starts)


def restore_generators(checkpoint: Path, team: Team) -> None:
    """Give this rank's generators their states back; seed them from all the old states where the ranks are others now."""
    path = checkpoint / GENERATORS
    stored = read_header(path)
    ranks = {int(key.partition(".")[2]) for key in stored}
    if ranks != set(range(team.size)):
        digest = hashlib.sha256(path.read_bytes() + team.rank.to_bytes(8, "little")).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        return
    for device, give in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        entry = stored.get(f"{device}.{team.rank:05}")
        if entry is not None and (device == "cpu" or torch.cuda.is_initialized()):
            with open_regular(path) as (descriptor, _):
                state = os.pread(descriptor, entry.nbytes, entry.offset)
            give(torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
