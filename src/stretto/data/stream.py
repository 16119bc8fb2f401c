"""The endless stream of training prompts: the prompt at a position follows from the seed and the position alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.types import Prompt


class PromptStream:
    """Prompts in epochs; each epoch holds every prompt once, in an order of its own when `shuffle` is set.

    There is no state to save: a resumed run asks for the next position and gets what the first run would have got.
    Raises ValueError when there are no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("there are no prompts to stream; check data.source and data.heldout")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def at(self, position: int) -> Prompt:
        """The prompt at `position` >= 0. Amortised O(1) while positions stay within an epoch."""
        assert position >= 0, position
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[place] if self._shuffle else place]

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, _permutation(len(self._prompts), self._seed, epoch))
        return self._cached[1]


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # numpy promises the raw stream of a bit generator across its versions, but not what Generator.permutation
    # makes of it; so the order is that of raw values, and a resume under another numpy sees the same prompts.
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
