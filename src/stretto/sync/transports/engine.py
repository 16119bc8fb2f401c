"""Into engines in processes of their own: `ipc` on the same host, `collective` between devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stretto.sync.receivers import Answer
from stretto.sync.session import Destination, Options, Session, Source
from stretto.types import Version
from stretto.world import World


class EngineTransport:
    """Every trainer rank sends its part of the plan; those that lead an engine also have its ranks receive.

    All ranks make it together, and with it the session, so that what cannot work is found before the first step. After
    a failure the next transfer opens a new session. Raises what :class:`~stretto.sync.session.Session` raises.
    """

    def __init__(self, world: World, source: Source, destination: Destination, options: Options):
        self._world, self._source, self._destination, self._options = world, source, destination, options
        self.name = options.transport
        self._answers: list[Answer] | None = []
        self._session: Session | None = Session(world, source, destination, options)
        self.refused = self._session.refused
        """Why the engines' parameters are not written directly; empty when they are."""
        self.unlike = self._session.unlike
        """How those parameters differ from what their layout says: then they cannot be read again either."""
        self.seconds: dict[str, float] = {}
        """Of the last transfer, by what it did."""

    @property
    def touched(self) -> bool:
        """Whether an engine that is led from here may have been written into; True when one did not say."""
        return self._answers is None or any(one.touched for one in self._answers)

    def transfer(self, version: Version) -> int:
        """Have every engine receive the weights; returns the bytes that were written to those led from here.

        Raises RuntimeError, on every rank, naming the bucket and the rank of the engine that failed.
        """
        self._answers = []
        if self._session is None:
            self._session = Session(self._world, self._source, self._destination, self._options)
        try:
            self.seconds.clear()
            with self._lap("call in"):
                self._session.call_in()
            with self._lap("exchange"):
                self._exchange(self._session)
            with self._lap("let go"):
                self._session.let_go()
        except BaseException as error:
            with suppress(RuntimeError):  # an engine that did not fail itself goes on, to serve or to refuse
                self._session.let_go()
            self.close()
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"the publication of {version} failed: {error}") from error
            raise
        return sum(one.written for one in self._answers or ())

    def verify(self) -> None:
        """Nothing more: every rank has verified what it received before it answered."""

    def reread(self, number: int | None) -> list[str]:
        """The tensors of the engines led from here that are not what the trainer has, of those whose turn it is.

        All ranks call together. Raises RuntimeError when an engine does not answer.
        """
        if self._session is None:
            raise RuntimeError("there is no publication to verify")
        self._session.call_in()
        try:
            return self._session.reread(number)
        finally:
            self._session.let_go()

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def _lap(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def _exchange(self, session: Session) -> None:
        """Send, and hear what the receivers say; an error anywhere is raised everywhere."""
        errors: list[str] = []
        if session.receivers is not None:
            session.receivers.ask("receive")
            self._answers = None
        try:
            session.sending.run()
        except (RuntimeError, ValueError) as error:
            errors.append(f"trainer rank {self._world.rank}: {error}")
            session.hang_up()
        try:
            if session.receivers is not None:
                self._answers = [Answer(*one) for one in session.receivers.answers("receive")]
                errors += [
                    f"engine rank {session.receivers.first + index}: {one.error}"
                    for index, one in enumerate(self._answers)
                    if one.error
                ]
        except RuntimeError as error:
            errors.append(str(error))
        if said := [line for lines in self._world.gather(errors) for line in lines]:
            raise RuntimeError("; ".join(said))
