"""The order in which tasks are drawn: a seeded shuffle per epoch that can be taken up anywhere.

The order is a function of (seed, epoch, size) alone, so a cursor's state is three small numbers
and a resumed run draws what the interrupted one would have drawn. Knows only indices.
"""

from typing import Self

import numpy as np


class TaskCursor:
    """Endless sequence of indices into `size` tasks, each exactly once per epoch."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("there are no tasks to draw from")
        self._size = size
        self._seed = seed
        self._epoch = 0
        self._position = 0
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

    def state(self) -> dict[str, int]:
        """What `from_state` needs, as JSON."""
        return {
            "size": self._size,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    @classmethod
    def from_state(cls, state: dict[str, int], size: int) -> Self:
        """The cursor that `state` was taken of. Raises ValueError if the number of tasks changed.

        Its order would be another one: some tasks would be drawn twice and others never.
        """
        if state["size"] != size:
            raise ValueError(
                f"the saved task order is over {state['size']} tasks, the data now has {size}; "
                "continue with the same data or start a new run"
            )
        if not 0 <= state["position"] < size or state["epoch"] < 0:
            raise ValueError(f"the saved task order is damaged: {state}")
        cursor = cls(size, state["seed"])
        cursor._epoch = state["epoch"]
        cursor._position = state["position"]
        cursor._order = cursor._shuffle()
        return cursor

    def _shuffle(self) -> np.ndarray:
        """int64[size]: this epoch's permutation."""
        sequence = np.random.SeedSequence([self._seed, self._epoch])
        return np.random.Generator(np.random.PCG64(sequence)).permutation(self._size)
