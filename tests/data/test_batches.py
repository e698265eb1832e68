"""Batches: the same samples on any mesh, no repeats, exact resumption, and refusals."""

import time
from pathlib import Path

import pytest
import torch

from meshtrain.data import Batching, ByteTokenizer, TokenDataset, check_batching, prepare_tokens
from meshtrain.errors import ContractError, Refused

SEQ = 8


def numbered(sequences: int, seq_len: int = SEQ) -> torch.Tensor:
    """A corpus in which the first token of a sequence tells which one it is."""
    return torch.arange(sequences * seq_len + 1)


def ids_of(dataset: TokenDataset, step: int, **layout: int) -> list[int]:
    """The sequences that one rank gets, in order."""
    return [int(row[0]) // SEQ for batch in dataset.batch(step, **layout) for row in batch.inputs]


def test_inputs_and_labels_are_the_sequence_and_its_shift() -> None:
    dataset = TokenDataset(numbered(20), SEQ, seed=0)
    (batch,) = dataset.batch(3, global_batch=4, dp=1, dp_rank=0)
    assert batch.inputs.shape == batch.labels.shape == (4, SEQ)
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.is_contiguous() and batch.labels.is_contiguous()
    assert torch.equal(batch.labels, batch.inputs + 1)
    assert torch.equal(batch.inputs[:, 0] % SEQ, torch.zeros(4, dtype=torch.int64))


def test_the_number_of_sequences_counts_the_label_of_the_last_token() -> None:
    assert len(TokenDataset(torch.arange(SEQ + 1), SEQ, 0)) == 1
    assert len(TokenDataset(torch.arange(2 * SEQ), SEQ, 0)) == 1
    assert len(TokenDataset(torch.arange(2 * SEQ + 1), SEQ, 0)) == 2


@pytest.mark.parametrize(
    ("dp", "micro_batch"),
    [(dp, size) for dp in (1, 2, 3, 4, 6, 12) for size in (None, 1, 2, 3) if 12 % (dp * (size or 1)) == 0],
)
def test_a_step_has_the_same_samples_on_every_mesh(dp: int, micro_batch: int | None) -> None:
    """Catches an order that depends on the rank count: a run would change with the mesh."""
    dataset = TokenDataset(numbered(50), SEQ, seed=1)
    for step in range(10):
        expected = ids_of(dataset, step, global_batch=12, dp=1, dp_rank=0)
        got: list[int] = []
        for rank in range(dp):
            batches = dataset.batch(step, global_batch=12, dp=dp, dp_rank=rank, micro_batch=micro_batch)
            assert {len(batch.inputs) for batch in batches} == {micro_batch or 12 // dp}
            got += [int(row[0]) // SEQ for batch in batches for row in batch.inputs]
        assert got == expected


def test_F6_resuming_and_changing_dp_neither_repeats_nor_skips() -> None:
    """64 sequences; 5 steps at dp 2, then a resume at dp 4, then at dp 1: each sequence comes once."""
    seen: list[int] = []
    for steps, dp in [(range(5), 2), (range(5, 9), 4), (range(9, 16), 1)]:
        dataset = TokenDataset(numbered(64), SEQ, seed=9)  # a new process has a new one
        for step in steps:
            for rank in range(dp):
                seen += ids_of(dataset, step, global_batch=4, dp=dp, dp_rank=rank)
    assert sorted(seen) == list(range(64))
    straight = TokenDataset(numbered(64), SEQ, seed=9)
    assert seen == [i for step in range(16) for i in ids_of(straight, step, global_batch=4, dp=1, dp_rank=0)]


def test_F6_a_changed_global_batch_goes_on_where_the_samples_ended() -> None:
    """Doubling the batch at half the step number continues the same sequence of samples."""
    dataset = TokenDataset(numbered(64), SEQ, seed=2)
    small = [i for step in range(8) for i in ids_of(dataset, step, global_batch=4, dp=1, dp_rank=0)]
    large = [i for step in range(4) for i in ids_of(dataset, step, global_batch=8, dp=1, dp_rank=0)]
    assert small == large


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (3, 5), (5, 2)])
def test_F6_a_resumed_run_may_change_its_global_batch(before: int, after: int) -> None:
    """Catches an offset that is ignored, or counted in steps: samples would repeat or be skipped at the resume."""
    dataset = TokenDataset(numbered(64), SEQ, seed=2)
    straight = [i for step in range(50) for i in ids_of(dataset, step, global_batch=1, dp=1, dp_rank=0)]
    seen = [i for step in range(5) for i in ids_of(dataset, step, global_batch=before, dp=1, dp_rank=0)]
    offset = 5 * before - 5 * after
    for step in range(5, 7):
        for rank in range(after):
            seen += ids_of(dataset, step, global_batch=after, dp=after, dp_rank=rank, micro_batch=1, offset=offset)
    assert seen == straight[: 5 * before + 2 * after]
    assert dataset.sequence_of(5, 1, global_batch=after, offset=offset) == straight[5 * before + 1]


def test_an_offset_may_be_negative_as_long_as_no_sample_number_is() -> None:
    dataset = TokenDataset(numbered(64), SEQ, seed=2)
    assert dataset.sequence_of(1, 0, global_batch=4, offset=-4) == dataset.sequence_of(0, 0, global_batch=4)
    with pytest.raises(
        ContractError, match=r"step 1, sample 0 .* offset of -5, is sample number -1 .* n - s \* global_batch"
    ):
        dataset.batch(1, global_batch=4, dp=1, dp_rank=0, offset=-5)


def test_C7_every_rank_has_as_many_micro_batches_in_every_step() -> None:
    """5 sequences, 2 ranks: the data's end falls within a step, which must not leave a rank short."""
    dataset = TokenDataset(numbered(5), SEQ, seed=0)
    for step in range(20):
        counts = {len(dataset.batch(step, global_batch=4, dp=2, dp_rank=rank, micro_batch=1)) for rank in range(2)}
        assert counts == {2}


def test_B7_global_tokens_is_the_sum_over_all_ranks_and_micro_batches() -> None:
    dataset = TokenDataset(numbered(30), SEQ, seed=0)
    parts = [dataset.batch(2, global_batch=12, dp=3, dp_rank=r, micro_batch=2) for r in range(3)]
    labels = sum(int((batch.labels >= 0).sum()) for part in parts for batch in part)
    assert labels == dataset.global_tokens(2, global_batch=12)


def test_no_sequence_repeats_within_an_epoch_and_epochs_differ() -> None:
    dataset = TokenDataset(numbered(24), SEQ, seed=4)
    steps = [ids_of(dataset, step, global_batch=6, dp=1, dp_rank=0) for step in range(8)]
    first = [i for step in steps[:4] for i in step]
    second = [i for step in steps[4:] for i in step]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_the_seed_changes_the_order() -> None:
    def order(seed: int) -> list[int]:
        return ids_of(TokenDataset(numbered(100), SEQ, seed), 0, global_batch=100, dp=1, dp_rank=0)

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32])
def test_token_types_keep_their_values(dtype: torch.dtype) -> None:
    top = {torch.uint8: 255, torch.uint16: 65535, torch.int32: 2**31 - 1, torch.uint32: 2**32 - 1}[dtype]
    tokens = torch.tensor([0, top, 1, top, 2], dtype=torch.int64).to(dtype)
    (batch,) = TokenDataset(tokens, 4, 0).batch(0, global_batch=1, dp=1, dp_rank=0)
    assert batch.inputs.tolist() == [[0, top, 1, top]]
    assert batch.labels.tolist() == [[top, 1, top, 2]]


def test_a_step_costs_little(tmp_path: Path) -> None:
    """The data must not show in the step time: 16 sequences of 1024 tokens within 10 ms on a busy machine."""
    dataset = TokenDataset(prepare_tokens(None, ByteTokenizer(), cache_dir=tmp_path), 1024, seed=0)
    dataset.batch(0, global_batch=64, dp=4, dp_rank=1)
    times = []
    for step in range(1, 30):
        start = time.perf_counter()
        dataset.batch(step, global_batch=64, dp=4, dp_rank=1, micro_batch=4)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 0.01


def test_check_batching_divides() -> None:
    assert check_batching(12, 2, 3) == Batching(12, 2, 3, 2)
    assert check_batching(12, 4, None) == Batching(12, 4, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((10, 4, None), ["global batch of 10", "dp 4", "Use 8 or 12"]),
        ((3, 4, None), ["global batch of 3", "Use 4"]),
        ((16, 4, 3), ["16", "dp 4 x micro-batch 3 = 12", "Use 12 or 24", "micro-batch of 2"]),
        ((10, 4, 1), ["dp 4 x micro-batch 1 = 4", "Use 8 or 12"]),
        ((0, 4, None), ["global batch is 0", "Give 1 or more"]),
        ((-8, 4, None), ["global batch is -8"]),
        ((8, 0, None), ["dp is 0"]),
        ((8, 4, 0), ["micro-batch is 0"]),
        ((8, 4, 1.5), ["micro-batch is 1.5", "whole number"]),
        ((True, 1, 1), ["global batch is True"]),
    ],
)
def test_divisions_that_do_not_work_are_refused(arguments: tuple, parts: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        check_batching(*arguments)
    for part in parts:
        assert part in str(caught.value)


def test_data_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(Refused, match=r"8 tokens.*length 8 takes 9.*at most 7"):
        TokenDataset(torch.arange(8), 8, 0)
    with pytest.raises(Refused, match="sequence length is 0"):
        TokenDataset(torch.arange(8), 0, 0)
    with pytest.raises(Refused, match="the data has 5 tokens"):
        check_batching(4, 2, 1, tokens=5, seq_len=5)


def test_misuse_is_a_contract_error() -> None:
    dataset = TokenDataset(numbered(4), SEQ, 0)
    with pytest.raises(ContractError, match=r"dp_rank 2 is not in 0..1"):
        dataset.batch(0, global_batch=4, dp=2, dp_rank=2)
    with pytest.raises(ContractError, match="steps count from 0"):
        dataset.batch(-1, global_batch=4, dp=2, dp_rank=0)
    with pytest.raises(ContractError, match="steps count from 0"):
        dataset.global_tokens(-1, global_batch=4)
    for bad in (torch.zeros(20), torch.zeros(4, 5, dtype=torch.int64)):
        with pytest.raises(ContractError, match="1-D integer tensor"):
            TokenDataset(bad, 4, 0)
