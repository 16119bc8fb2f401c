"""The gates as a forward pass of the embedded engine meets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.engines.base import EngineError
from stretto.engines.control import Control


class StepControl(Control):
    """Its unit of computing is one forward pass, in the generating thread."""

    under_way = "the forward pass under way"

    @contextmanager
    def step(self, deadline: float) -> Iterator[bool]:
        """One forward pass; waits for both gates until `deadline` (time.monotonic seconds).

        Gives False when an abort or the end came first: nothing may be computed then. EngineError at the deadline, and
        at once when the weights are mixed.
        """
        with self._condition:
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._condition.wait_for(lambda: self._disturbed or self._refuses or not self._shut_by(), left):
                raise EngineError(f"{self._shut_by()} at the rollout's deadline (rollout.timeout_s)")
            disturbed, self._disturbed = self._disturbed, False
            if self._refuses and not disturbed:
                raise self._refusal()
            self._computing = int(not disturbed)
        try:
            yield not disturbed
        finally:
            with self._condition:
                self._computing = 0
                self._changed()
