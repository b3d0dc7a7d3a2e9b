"""The order of examples in a training, as a function of a position that a checkpoint can have."""

from __future__ import annotations

import numpy as np

from pycollective.errors import message


class Batches:
    """The numbers of the examples of each batch, in an order that each epoch draws anew.

    Batch ``i`` depends on the seed and on ``i`` alone, not on the number of ranks. So a training that goes on from a
    checkpoint, on any layout, sees each example once in each epoch, as if it had not been interrupted. The last
    examples of an epoch that fill no batch are left out; another epoch leaves out others.

    Args:
        examples: the number of examples.
        batch_size: the number of examples of a batch, over all ranks.
        seed: the seed of the order, from 0.
        position: the number of batches that have been taken. Default 0.

    Attributes:
        position: the number of batches that have been taken, to be saved in the notes of a checkpoint.

    Raises:
        ValueError: there are fewer examples than a batch has, or a number is too small.

    Example:
        >>> import numpy as np
        >>> batches = Batches(10, 4, seed=0)
        >>> first, second = next(batches), next(batches)
        >>> len(first), len(set(first) | set(second)), batches.position
        (4, 8, 2)
        >>> bool((next(Batches(10, 4, seed=0, position=1)) == second).all())
        True

        A rank takes its part:

        >>> import pycollective as pc
        >>> comm = pc.world()
        >>> own = np.array_split(first, comm.size)[comm.rank]
    """

    def __init__(self, examples: int, batch_size: int, seed: int, *, position: int = 0) -> None:
        if not 1 <= batch_size <= examples or seed < 0 or position < 0:
            got = f"examples={examples}, batch_size={batch_size}, seed={seed}, position={position}"
            expected = "1 <= batch_size <= examples, and a seed and a position from 0"
            raise ValueError(message("parallel.Batches", expected, got, "Choose a smaller batch, or other numbers."))
        self.position = position
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __iter__(self) -> Batches:
        """Returns itself."""
        return self

    def __next__(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the numbers of the examples of the next batch, the same on all ranks: a vector of int64."""
        epoch, place = divmod(self.position, self._examples // self._batch_size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._examples)
        self.position += 1
        return self._order[place * self._batch_size : (place + 1) * self._batch_size]
