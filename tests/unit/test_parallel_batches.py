"""The order of examples: each once in an epoch, another one in each epoch, the same after a new start."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective.parallel.batches import Batches


def test_order() -> None:
    def taken(first: int, count: int, seed: int = 3) -> list[list[int]]:
        batches = Batches(11, 3, seed, position=first)
        found = [next(batches).tolist() for _ in range(count)]
        assert batches.position == first + count
        return found

    batches = taken(0, 9)
    epochs = [np.concatenate(batches[i : i + 3]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert len(set(epoch)) == 9
        assert set(epoch) < set(range(11))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for first in range(9):
        assert taken(first, 9 - first) == batches[first:]
    assert taken(0, 9, seed=4) != batches
    assert next(iter(Batches(3, 3, 0))).dtype == np.int64


def test_wrong_numbers() -> None:
    for examples, batch_size, seed, position in ((3, 4, 0, 0), (3, 0, 0, 0), (3, 1, -1, 0), (3, 1, 0, -1)):
        with pytest.raises(
            ValueError, match=f"expected 1 <= batch_size <= examples, .* got examples=3, batch_size={batch_size}"
        ):
            Batches(examples, batch_size, seed, position=position)
