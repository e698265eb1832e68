"""What ranks tell each other around a transfer: that all came, that all planned the same, and whether one
failed.

Everything goes as plain integers and bytes in tensors; nothing is pickled. A team of one has no process
group.
"""

from __future__ import annotations

import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.errors import ContractError, Damaged, MeshtrainError, Refused

JOIN_SECONDS = 30.0
_MESSAGE_BYTES = 4000
_KINDS: tuple[type[MeshtrainError], ...] = (Damaged, Refused, ContractError, MeshtrainError)

_joined: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Team:
    """The ranks that take part in one transfer."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        on_cpu = group is None or "cpu" in {device.type for device in group._device_types}
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def join(self, call: str, seconds: float = JOIN_SECONDS) -> None:
        """Wait until every rank has made this call. Raises ContractError after `seconds`, naming the ranks
        that have not.

        The group's store is asked, not a collective, because a collective that some ranks never enter leaves
        the group
        unusable: after this error it still works.
        """
        if self.group is None or self.size == 1:
            return
        store = dist.distributed_c10d._get_process_group_store(self.group)
        number = _joined.get(self.group, 0)
        prefix = f"meshtrain/state/{number}"
        store.set(f"{prefix}/{self.rank}", call)
        if store.add(f"{prefix}/count", 1) == self.size:
            store.set(f"{prefix}/go", "1")
        # Asked again and again rather than waited for: all threads of a process share the connection to the store, and one
        # that waits there keeps the others from saying that they have come.
        end, pause = time.monotonic() + seconds, 0.001
        while not store.check([f"{prefix}/go"]):
            if time.monotonic() > end:
                absent = [rank for rank in range(self.size) if not store.check([f"{prefix}/{rank}"])]
                store.add(f"{prefix}/count", -1)
                store.delete_key(f"{prefix}/{self.rank}")
                raise ContractError(
                    f"{call} was called on rank {self.rank}, but after {seconds:g} s not on rank(s) "
                    f"{', '.join(map(str, absent)) or 'that gave up waiting'} of {self.size}. It is collective: every rank has "
                    "to call it, so take it out of any `if rank == 0:`"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        _joined[self.group] = number + 1
        store.delete_key(f"{prefix}/{self.rank}")
        if self.rank == 0 and number:
            # Everybody is past the join before this one, so nobody waits on its keys any more.
            for key in ("count", "go"):
                store.delete_key(f"meshtrain/state/{number - 1}/{key}")

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error; the message names the ranks and their causes."""
        if self.size == 1:
            if error is None:
                return
            if isinstance(error, MeshtrainError):
                raise error
            raise MeshtrainError(_cause(error)) from error
        message = b"" if error is None else self._encode(error)
        longest = torch.tensor([len(message)], dtype=torch.int64, device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        if not longest.item():
            return
        said = [row.rstrip(b"\0") for row in self._gather(message.ljust(int(longest.item()), b"\0"))]
        first = next(text for text in said if text)
        kind = _KINDS[first[0] - 1]
        lines: dict[str, list[int]] = {}
        for rank, text in enumerate(said):
            if text:
                lines.setdefault(text[1:].decode(errors="replace"), []).append(rank)
        if list(lines.values()) == [list(range(self.size))]:
            raise kind(next(iter(lines))) from error
        raise kind("\n".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in lines.items())) from error

    def same(self, digest: bytes, what: str) -> None:
        """Raise ContractError on every rank unless all bring the same `digest`."""
        if self.size == 1:
            return
        all_digests = self._gather(digest)
        differ = [rank for rank, other in enumerate(all_digests) if other != all_digests[0]]
        if differ:
            raise ContractError(
                f"{what} on rank(s) {', '.join(map(str, differ))} is not what it is on rank 0; it has to be "
                f"the same on all"
            )

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return flag if self.size == 1 else all(row == b"\1" for row in self._gather(b"\1" if flag else b"\0"))

    def xor(self, numbers: list[int]) -> list[int]:
        """The bitwise XOR over all ranks of each of as many 32-bit numbers as every rank brings."""
        if self.size == 1 or not numbers:
            return numbers
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        if self._device.type == "cpu":
            dist.all_reduce(mine, dist.ReduceOp.BXOR, group=self.group)
            return [int(number) for number in mine.tolist()]
        rows = [torch.empty_like(mine) for _ in range(self.size)]  # nccl has no XOR
        dist.all_gather(rows, mine, group=self.group)
        for row in rows[1:]:
            rows[0] ^= row
        return [int(number) for number in rows[0].tolist()]

    def gather(self, row: bytes) -> list[bytes]:
        """The bytes of every rank, of any length, by rank."""
        if self.size == 1:
            return [row]
        lengths = [int.from_bytes(each, "little") for each in self._gather(len(row).to_bytes(8, "little"))]
        padded = self._gather(row.ljust(max(lengths), b"\0"))
        return [each[:length] for each, length in zip(padded, lengths)]

    def from_first(self, text: str) -> str:
        """The text of rank 0."""
        if self.size == 1:
            return text
        raw = text.encode(errors="surrogateescape") if self.rank == 0 else b""
        length = torch.tensor([len(raw)], dtype=torch.int64, device=self._device)
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self.group)
        return self._gather(raw.ljust(int(length.item()), b"\0"))[0].decode(errors="surrogateescape")

    def send_to_first(self, data: Tensor) -> None:
        """Send bytes (uint8, 1-D, on the CPU) to rank 0."""
        dist.send(data.to(self._device), group=self.group, group_dst=0)

    def receive(self, data: Tensor, rank: int) -> None:
        """Receive bytes that `rank` sends."""
        there = data if self._device.type == "cpu" else torch.empty_like(data, device=self._device)
        dist.recv(there, group=self.group, group_src=rank)
        if there is not data:
            data.copy_(there)

    def _gather(self, row: bytes) -> list[bytes]:
        if not row:
            return [b""] * self.size
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [bytes(each.tolist()) for each in rows]

    def _encode(self, error: Exception) -> bytes:
        kind = next((n for n, k in enumerate(_KINDS, 1) if isinstance(error, k)), len(_KINDS))
        return bytes([kind]) + _cause(error).encode(errors="replace")[:_MESSAGE_BYTES]


def _cause(error: Exception) -> str:
    if isinstance(error, MeshtrainError):
        return str(error)
    return f"{type(error).__name__}: {error}"
