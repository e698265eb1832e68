"""The order of samples is a permutation for every size, seed and epoch, and shuffles."""

import random
import time
from itertools import pairwise

import pytest

from meshtrain.data.order import permuted_index, sequence_of_sample

SIZES = [*range(1, 70), 97, 100, 127, 128, 129, 255, 256, 257, 1000, 1023, 1025, 4095, 4097, 10007]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_gives_a_permutation(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (12345, 7), (-3, 0), (2**70, 2)]:
        assert sorted(permuted_index(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [permuted_index(i, 500, seed, epoch) for i in range(500)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_the_order_of_a_seed_never_changes() -> None:
    """A run resumed under a later version must go on with the same samples: these values are part of the
    format."""
    assert [permuted_index(i, 10, 0, 0) for i in range(10)] == [6, 0, 7, 5, 8, 3, 9, 1, 2, 4]
    assert permuted_index(123456789, 10**12, 42, 3) == 913716681193


def test_shuffles_about_as_well_as_a_random_order() -> None:
    """Catches a network with too few rounds: neighbours would stay near each other, or elements in place."""
    size = 10_000
    order = [permuted_index(i, size, 3, 0) for i in range(size)]
    assert sum(i == value for i, value in enumerate(order)) < 10
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 15
    mean_jump = sum(abs(a - b) for a, b in pairwise(order)) / size
    assert abs(mean_jump / (size / 3) - 1) < 0.05
    counts = [0] * 16
    for value in order[: size // 4]:
        counts[value * 16 // size] += 1
    assert max(abs(count - size / 64) for count in counts) < 60


def test_a_place_is_hit_uniformly_over_seeds() -> None:
    counts = [0] * 7
    for seed in range(7000):
        counts[permuted_index(2, 7, seed, 0)] += 1
    assert all(850 < count < 1150 for count in counts), counts


def test_a_trillion_sequences_cost_no_more_than_a_thousand() -> None:
    chosen = random.Random(0)
    size = 10**12
    start = time.perf_counter()
    found = {permuted_index(chosen.randrange(size), size, 0, 0) for _ in range(1000)}
    assert time.perf_counter() - start < 2
    assert all(0 <= value < size for value in found)
    assert len(found) > 990


def test_samples_run_through_whole_epochs() -> None:
    size = 37
    samples = [sequence_of_sample(k, size, 5) for k in range(3 * size)]
    epochs = [samples[i : i + size] for i in range(0, len(samples), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
def test_an_index_out_of_range_is_an_error(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="outside of the permutation"):
        permuted_index(index, size, 0, 0)
