"""The gates as requests to a server meet them."""

from __future__ import annotations

from collections.abc import Callable

from stretto.engines.base import EngineError
from stretto.engines.control import Control
from stretto.types import Version


class RequestControl(Control):
    """Its unit of computing is one request to the server; `changed` is called, from any thread, after every change."""

    under_way = "what the server was generating"

    def __init__(self, changed: Callable[[], None]):
        super().__init__()
        self._tell = changed

    def begin_request(self, request_id: int) -> Version | None:
        """The version that will compute it, until `end_request`; None when it may not begin now or never.

        Raises EngineError when the weights are mixed.
        """
        with self._condition:
            if self.is_aborted(request_id):
                return None
            if self._refuses:
                raise self._refusal()
            if self._shut_by():
                return None
            self._computing += 1
            return self.version

    def end_request(self) -> None:
        """The server's answer is here, or never comes."""
        with self._condition:
            self._computing -= 1
            self._changed()

    @property
    def shut(self) -> str | None:
        """Why nothing may begin now, or None."""
        with self._condition:
            return self._shut_by()

    @property
    def serves(self) -> bool:
        """Whether tokens may be computed now."""
        with self._condition:
            return not (self._closed or self._mixed or self._shut_by())

    @property
    def paused(self) -> bool:
        """Whether `pause` shut its gate."""
        return self._paused

    def overdue(self, unfinished: int) -> EngineError:
        """What to raise at the rollout's deadline."""
        return EngineError(
            f"{shut} at the rollout's deadline (rollout.timeout_s)"
            if (shut := self.shut)
            else f"{unfinished} samples were unfinished at the deadline (rollout.timeout_s)"
        )

    def _changed(self) -> None:
        super()._changed()
        self._tell()
