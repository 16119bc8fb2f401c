"""What a trainer rank and the engines keep between publications: connections, slots, each side's part of the plan."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Literal

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from stretto.sync.layout import Layout
from stretto.sync.links import JoinedLink, Link, SharedSender
from stretto.sync.plan import Plan
from stretto.sync.receivers import Door, Enterable, Receivers, Terms
from stretto.sync.reread import sample_of
from stretto.sync.sending import Sending, sending
from stretto.sync.windows import parts_of
from stretto.world import World


@dataclass(frozen=True)
class Source:
    """A trainer's weights: its layout, and the local tensors that fit it or a stream of whole ones."""

    layout: Layout
    weights: Callable[[], Mapping[str, Tensor]]
    stream: Callable[[], Iterable[tuple[str, Tensor]]] | None = None


@dataclass(frozen=True)
class Destination:
    """The engines of a run, of `ranks_each` ranks; `engine` is the one that this rank leads, if it leads one.

    Their ranks hold the weights as `direct` says, and take whole tensors, as `loader` says them, otherwise.
    """

    engine: Enterable | None
    ranks_each: int
    direct: Layout
    loader: Layout


@dataclass(frozen=True)
class Options:
    """`write`: where the engine takes weights; `extra_bytes` bounds the slots of a rank; every wait is `timeout_s`.

    `host` is the trainer's first rank as others reach it, for `collective`.
    """

    transport: Literal["ipc", "collective"]
    write: Literal["auto", "direct", "loader"]
    extra_bytes: int
    checksums: bool
    timeout_s: float
    host: str = "127.0.0.1"


class Session:
    """Made by all ranks of the trainer together.

    Direct writes are taken where every rank of every engine can be written so, unless `options.write` says otherwise;
    `refused` says why not, and `unlike` how their parameters differ from the layout for such writes. Raises ValueError
    when the weights do not fill the engines', and RuntimeError, on every rank, when an engine's ranks do not come.
    """

    def __init__(self, world: World, source: Source, destination: Destination, options: Options):
        self._world, self._options = world, options
        self._source, self._destination = source, destination
        key = bytes.fromhex(world.from_first(secrets.token_hex(16)))
        door = Door(key)
        senders = world.gather(door.address)
        leads = world.gather(destination.engine is not None)
        first = sum(leads[: world.rank]) * destination.ranks_each
        self._numbers = [world.size + rank for rank in range(destination.direct.ranks)]
        self._mine = self._numbers[first : first + destination.ranks_each]
        self.receivers = (
            Receivers(destination.engine, destination.ranks_each, first, senders, key, options.timeout_s)
            if destination.engine is not None
            else None
        )
        self._link: Link | None = None
        self._store: TCPStore | None = None
        try:
            self.call_in()
            self.unlike, self.refused = self._inspect()
            self.sending = self._connect(door, self._terms())
            self.let_go()
        except BaseException:
            self.close()
            raise
        finally:
            door.close()

    def call_in(self) -> None:
        """Have the engines' ranks listen. Raises RuntimeError, on every rank, naming whose did not come."""
        self._on_every_rank(lambda receivers: receivers.begin())

    def let_go(self) -> None:
        """Let the engines go on."""
        self._on_every_rank(lambda receivers: receivers.end())

    def reread(self, number: int | None) -> list[str]:
        """The tensors of the engines led from here, among those whose turn it is, that are not what the trainer has.

        None are compared where the parameters are not those of the layout for direct writes. The ranks are called in.
        """
        if self.unlike:
            return []
        assert self._link is not None, "the session is made"
        part = sample_of(self._direct_plan, number)
        if self.receivers is not None:
            self.receivers.ask("reread", [(part, process) for process in self._mine])
        sending([part], self._world.rank, self._source.weights, self._source.stream, self._link).run()
        found: list[str] = []
        self._on_every_rank(lambda receivers: found.extend(name for one in receivers.answers("reread") for name in one))
        return found

    def hang_up(self) -> None:
        """Close the way of the buckets: whoever waits for one hears of it at once."""
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Close everything. Ranks that are called in come back with an error."""
        self.hang_up()
        if self.receivers is not None:
            self.receivers.close()

    def _on_every_rank(self, act: Callable[[Receivers], object]) -> None:
        error = None
        try:
            if self.receivers is not None:
                act(self.receivers)
        except (RuntimeError, OSError) as failure:
            error = str(failure)
        if said := [one for one in self._world.gather(error) if one]:
            raise RuntimeError("; ".join(said))

    def _inspect(self) -> tuple[list[str], list[str]]:
        """How the engines' parameters differ from the layout for direct writes, and why there are none."""
        unlike: list[str] = []
        derived: list[str] = []

        def ask(receivers: Receivers) -> None:
            receivers.ask("inspect", [self._destination.direct] * receivers.count)
            for differences, reasons in receivers.answers("inspect"):
                unlike.extend(differences)
                derived.extend(reasons)

        self._on_every_rank(ask)
        unlike, derived = self._world.union(unlike), self._world.union(derived)
        if self._options.write == "loader":
            return unlike, ['sync.write is "loader"']
        found = [*unlike, *derived]
        if found and self._options.write == "direct":
            raise ValueError('sync.write = "direct", but the engine cannot be written so: ' + "; ".join(found[:5]))
        return unlike, found

    def _terms(self) -> Terms:
        write = "loader" if self.refused else "direct"
        options = self._options
        windowed = write == "loader" or self._source.stream is not None
        return Terms(write, windowed, options.checksums, options.extra_bytes, self._serve_store())

    def _serve_store(self) -> tuple[str, int] | None:
        """The address of the store that the first rank serves, when there is a group to join."""
        if self._options.transport == "ipc":
            return None
        if self._world.first:
            timeout = timedelta(seconds=self._options.timeout_s)
            self._store = TCPStore(self._options.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return self._options.host, self._world.from_first(self._store.port if self._store else None)

    @cached_property
    def _direct_plan(self) -> Plan:
        return Plan.of(self._source.layout, self._destination.direct, self._numbers)

    def _connect(self, door: Door, terms: Terms) -> Sending:
        """Give everyone the plan and make the link."""
        source, loader = self._source, self._destination.loader
        plan = self._direct_plan if terms.write == "direct" else Plan.of(source.layout, loader, self._numbers)
        if self.receivers is not None:
            self.receivers.ask("connect", [(plan, process, terms) for process in self._mine])
        link = self._link = self._make_link(door, self._numbers, terms)
        self._on_every_rank(lambda receivers: receivers.answers("connect"))
        parts = parts_of(plan, windowed=terms.windows)
        checksums = self._options.checksums
        return sending(parts, self._world.rank, source.weights, source.stream, link, checksums=checksums)

    def _make_link(self, door: Door, numbers: Sequence[int], terms: Terms) -> Link:
        device, options = self._world.device, self._options
        if terms.store is None:
            connections = _meet(door, numbers, options.timeout_s)
            return SharedSender(device, connections, options.extra_bytes, timeout_s=options.timeout_s)
        return JoinedLink(
            device,
            self._world.rank,
            self._world.size + len(numbers),
            terms.store,
            options.extra_bytes,
            timeout_s=options.timeout_s,
            store=self._store,
        )


def _meet(door: Door, numbers: Sequence[int], timeout_s: float) -> dict[int, Connection]:
    """A connection to each process that receives, by its number."""
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(numbers):
        connection = door.accept(max(0.01, deadline - time.monotonic()))
        if connection is None:
            missing = sorted(set(numbers) - set(found))
            raise RuntimeError(f"processes {missing} of the engines did not connect within {timeout_s:g} s")
        found[int(connection.recv())] = connection
    return found
