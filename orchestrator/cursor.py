"""The order in which tasks are drawn: a seeded shuffle per epoch that can be taken up anywhere.

The order is a function of (seed, epoch, size) alone, so a run that is taken up again and says how
many were drawn draws what the interrupted one would have drawn. Knows only indices.
"""

import numpy as np


class TaskCursor:
    """Endless sequence of indices into `size` tasks, each exactly once per epoch."""

    def __init__(self, size: int, seed: int, *, drawn: int = 0) -> None:
        """`drawn` indices have been drawn before."""
        if size < 1:
            raise ValueError("there are no tasks to draw from")
        self._size = size
        self._seed = seed
        self._epoch, self._position = divmod(drawn, size)
        self._order = self._shuffle()

    @property
    def epoch(self) -> int:
        """Complete passes over the tasks before the next index."""
        return self._epoch

    @property
    def position(self) -> int:
        """Indices of this epoch already drawn."""
        return self._position

    def next(self) -> int:
        """The next index, in [0, size)."""
        index = int(self._order[self._position])
        self._position += 1
        if self._position == self._size:
            self._epoch += 1
            self._position = 0
            self._order = self._shuffle()
        return index

    def _shuffle(self) -> np.ndarray:
        """int64[size]: this epoch's permutation."""
        sequence = np.random.SeedSequence([self._seed, self._epoch])
        return np.random.Generator(np.random.PCG64(sequence)).permutation(self._size)
