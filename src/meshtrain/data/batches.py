"""Batches as a function of the step: which token sequences every rank trains on, without state or
communication.

Sample i of step s is sample number offset + s * global_batch + i of the run, and that number alone (with the seed)
decides the sequence: see `order.py`. So a run can be stopped and resumed, or go on with another dp size,
micro-batch or (by the offset) global batch, and no sample is repeated or skipped. Every dp rank has the same
number of micro-batches in every step, of equal size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshtrain.data.order import sequence_of_sample
from meshtrain.data.tokens import TokenFile, open_tokens
from meshtrain.errors import ContractError, Refused


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one dp rank."""

    inputs: Tensor
    """int64 [micro_batch, seq_len]."""
    labels: Tensor
    """int64 [micro_batch, seq_len]: labels[b, t] is the token that follows inputs[b, t]. All of them count in the loss,
    since packed sequences have no padding."""


@dataclass(frozen=True)
class Batching:
    """How a step's global batch is divided; every size counts sequences."""

    global_batch: int
    dp: int
    micro_batch: int
    micro_batches: int
    """Micro-batches that each dp rank accumulates in a step."""


def check_batching(
    global_batch: int,
    dp: int,
    micro_batch: int | None,
    *,
    tokens: int | None = None,
    seq_len: int | None = None,
) -> Batching:
    """Check how a global batch is divided over dp ranks and micro-batches, and return the division.

    `micro_batch` None is all of a rank's share at once. If `tokens` (of the corpus) and `seq_len` are given,
    also check that there is at least one whole sequence. Raises Refused, naming the nearest sizes that work.
    """
    sizes = {"global batch": global_batch, "dp": dp, "micro-batch": micro_batch, "sequence length": seq_len}
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise Refused(f"{name} is {value!r}, which is not a positive whole number. Give 1 or more")
    unit = dp * (micro_batch or 1)
    if global_batch % unit:
        rule = f"dp {dp}" if micro_batch is None else f"dp {dp} x micro-batch {micro_batch} = {unit}"
        below, above = global_batch // unit * unit, -(-global_batch // unit) * unit
        near = f"{below} or {above}" if below else f"{above}"
        other = ""
        if micro_batch is not None and global_batch % dp == 0:
            share = global_batch // dp
            fitting = max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)
            other = f", or a micro-batch of {fitting}"
        raise Refused(f"a global batch of {global_batch} sequences is not a multiple of {rule}. Use {near}{other}")
    if tokens is not None and seq_len is not None and tokens < seq_len + 1:
        longest = f", or a sequence length of at most {tokens - 1}" if tokens > 1 else ""
        raise Refused(
            f"the data has {tokens} tokens, but one sequence of length {seq_len} takes {seq_len + 1}. "
            f"Give more data{longest}"
        )
    share = global_batch // dp
    return Batching(global_batch, dp, micro_batch or share, share // (micro_batch or share))


class TokenDataset:
    """A corpus of tokens cut into sequences, in an order that belongs to the seed.

    Sequence j is tokens j * seq_len .. (j + 1) * seq_len, both ends included: seq_len inputs, and the labels
    one token further on. Documents are packed without padding, so a sequence may span several. The last
    tokens that do not fill a sequence are never used."""

    def __init__(self, tokens: TokenFile | Tensor | str | Path, seq_len: int, seed: int) -> None:
        """`tokens`: an open token file, its path, or any 1-D integer tensor. `seq_len` counts tokens.
        Raises Refused if there is not one whole sequence, ContractError for a tensor of another kind."""
        if isinstance(tokens, (str, Path)):
            tokens = open_tokens(tokens)
        self._tokens = tokens.tokens if isinstance(tokens, TokenFile) else tokens
        if self._tokens.dim() != 1 or self._tokens.is_floating_point() or self._tokens.is_complex():
            raise ContractError(
                f"TokenDataset takes a 1-D integer tensor of token ids, not {list(self._tokens.shape)} "
                f"{self._tokens.dtype}; flatten it, or pass the path of a token file"
            )
        check_batching(1, 1, None, tokens=len(self._tokens), seq_len=seq_len)
        self.seq_len = seq_len
        self.seed = seed
        self._count = (len(self._tokens) - 1) // seq_len

    def __len__(self) -> int:
        """Number of sequences: the samples of one epoch."""
        return self._count

    def sequence_of(self, step: int, index: int, *, global_batch: int, offset: int = 0) -> int:
        """The sequence that is sample `index` of the global batch of `step` (both from 0).

        `offset` counts the samples before step 0, had every step been of `global_batch`: a run that goes on at step s,
        after n samples and with another global batch, has the offset n - s * global_batch. It may be negative."""
        sample = offset + step * global_batch + index
        if step < 0 or not 0 <= index < global_batch:
            raise ContractError(
                f"step {step}, sample {index}: steps count from 0 and the samples of a global batch of "
                f"{global_batch} from 0 to {global_batch - 1}"
            )
        if sample < 0:
            raise ContractError(
                f"step {step}, sample {index} of a global batch of {global_batch}, at an offset of {offset}, is sample number "
                f"{sample} of the run, and those count from 0. A run that goes on at step s after n samples has the "
                "offset n - s * global_batch"
            )
        return sequence_of_sample(sample, self._count, self.seed)

    def global_tokens(self, step: int, *, global_batch: int) -> int:
        """Labels that count in the loss of `step`, over all ranks and micro-batches. Every rank knows it
        unasked."""
        if step < 0:
            raise ContractError(f"step {step}: steps count from 0")
        return global_batch * self.seq_len

    def batch(
        self,
        step: int,
        *,
        global_batch: int,
        dp: int,
        dp_rank: int,
        micro_batch: int | None = None,
        offset: int = 0,
    ) -> list[Batch]:
        """The micro-batches of dp rank `dp_rank` in `step`, in order, on the CPU.

        Rank r has samples r * global_batch / dp .. (r + 1) * global_batch / dp - 1 of the step. Ranks that
        differ only in tp must pass the same `dp_rank`. `offset`: see `sequence_of`. Raises Refused for a division
        that does not work (see `check_batching`), ContractError for a step, sample number or rank out of range."""
        division = check_batching(global_batch, dp, micro_batch)
        if not 0 <= dp_rank < dp:
            raise ContractError(f"dp_rank {dp_rank} is not in 0..{dp - 1}; pass this rank's coordinate on the dp axis")
        first = dp_rank * (global_batch // dp)
        batches = []
        for start in range(first, first + global_batch // dp, division.micro_batch):
            # One token more than the inputs: the labels are the same tokens, one further on.
            rows = torch.empty(division.micro_batch, self.seq_len + 1, dtype=torch.int64)
            for row in range(division.micro_batch):
                sequence = self.sequence_of(step, start + row, global_batch=global_batch, offset=offset)
                rows[row] = self._tokens[sequence * self.seq_len : (sequence + 1) * self.seq_len + 1]
            batches.append(Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return batches
