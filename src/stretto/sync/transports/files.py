"""What `disk` and `http` have in common: a parcel is packed, every engine verifies it, then every engine loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from stretto.sync import windows
from stretto.sync.gathering import Gathering, GatherStream, GatherTensors
from stretto.sync.layout import Layout
from stretto.sync.parcels.manifest import Label
from stretto.sync.parcels.packing import Packed, Packer, Shelf
from stretto.sync.parcels.places import Place, Reader, Step
from stretto.sync.receiving import head_copies
from stretto.sync.session import Destination, Source
from stretto.types import Version
from stretto.world import World


class Places(Shelf, Protocol):
    """A shelf that knows where each engine finds what lies on it."""

    def places(self, engines: int) -> Sequence[Place]:
        """One for each engine. ValueError when there are not as many."""
        ...


@dataclass(frozen=True)
class FileOptions:
    """`target`: the checkpoint's tensors as the engines take them; `extra_bytes` bounds the slots of a trainer rank.

    Every wait is `timeout_s`.
    """

    target: Layout
    delta: bool
    extra_bytes: int
    timeout_s: float


class FilesTransport:
    """All ranks of the trainer make it together; the first one opens the shelf, and writes.

    Nothing is loaded before every rank of every engine has verified the whole parcel. Raises ValueError, on every rank,
    when the shelf cannot be had, or when the trainer's weights do not fill the checkpoint's tensors.
    """

    def __init__(
        self,
        name: str,
        world: World,
        source: Source,
        destination: Destination,
        options: FileOptions,
        open_shelf: Callable[[], Places],
    ):
        self.name, self._world = name, world
        self.touched = False
        """Whether the last transfer may have written into an engine's weights."""
        self.full_bytes = 0
        """Bytes that the last parcel would have taken without a delta; counted on the first rank, as transfer does."""
        leads = world.gather(destination.engine is not None)
        self._engines, self._mine = sum(leads), sum(leads[: world.rank])
        self._reader = (
            Reader(destination.engine, self._mine * destination.ranks_each, destination.ranks_each, options.timeout_s)
            if destination.engine is not None
            else None
        )
        self._windows = _gathering(world, source, options)
        self._shelf: Places | None = None
        self._packer: Packer | None = None
        self._open(open_shelf, options)

    def transfer(self, version: Version) -> int:
        """Pack a parcel and have every engine read it; returns the bytes that it took, on the first rank.

        Raises RuntimeError, on every rank, naming the directory and the rank of the engine that failed.
        """
        self.touched = False
        try:
            packed, places = self._pack(version)
            self._have_read("verify", packed.label, places)
            self.touched = True
            self._have_read("load", packed.label, places)
            self._everywhere(lambda: self._packer.keep() if self._packer else None)
        except BaseException as error:
            if self._packer is not None:
                self._packer.forget()
            if isinstance(error, RuntimeError):
                served = "" if self.touched else "; the engines serve the version before it on"
                raise RuntimeError(f"the publication of {version} failed: {error}{served}") from error
            raise
        self.full_bytes = packed.full_bytes if self._world.first else 0
        return packed.bytes if self._world.first else 0

    def verify(self) -> None:
        """Nothing more: every rank of the engines has verified the parcel before it was loaded."""

    def close(self) -> None:
        """Remove all parcels."""
        if self._shelf is not None:
            with suppress(RuntimeError, OSError):  # its place may be gone
                self._shelf.close()
            self._shelf = self._packer = None

    def _open(self, open_shelf: Callable[[], Places], options: FileOptions) -> None:
        error = None
        if self._world.first:
            try:
                self._shelf = open_shelf()
                self._shelf.places(self._engines)
                self._packer = Packer(self._shelf, head_copies(options.target), delta=options.delta)
            except (ValueError, RuntimeError) as failure:
                self.close()
                error = str(failure)
        if error := self._world.from_first(error):
            raise ValueError(error)

    def _pack(self, version: Version) -> tuple[Packed, Sequence[Place]]:
        """The parcel, and where each engine finds it."""
        packed: list[tuple[Packed, Sequence[Place]]] = []
        gathered = iter(self._windows)

        def pack() -> None:
            if self._packer is not None and self._shelf is not None:
                made = self._packer.pack(version, gathered)
                packed.append((made, self._shelf.places(self._engines)))

        def gather_on() -> None:
            for _ in gathered:  # to the end whatever became of the parcel: the other ranks do so too
                pass

        self._everywhere(pack, gather_on)
        return self._world.from_first(packed[0] if packed else None)

    def _have_read(self, step: Step, parcel: Label, places: Sequence[Place]) -> None:
        reader = self._reader
        if reader is not None:
            self._everywhere(lambda: reader.read(step, places[self._mine], parcel))
        else:
            self._everywhere()

    def _everywhere(self, *acts: Callable[[], object]) -> None:
        """Do them here; an error on any rank is raised on every rank."""
        errors: list[str] = []
        for act in acts:
            try:
                act()
            except (RuntimeError, ValueError, OSError) as error:
                errors.append(f"trainer rank {self._world.rank}: {error}")
        if said := [line for lines in self._world.gather(errors) for line in lines]:
            raise RuntimeError("; ".join(said))


def _gathering(world: World, source: Source, options: FileOptions) -> Gathering:
    target, most = options.target, windows.WINDOW_BYTES
    if source.stream is not None:
        return GatherStream(source.layout, target, source.stream, most, keeps=world.first)
    return GatherTensors(source.layout, target, world.rank, source.weights, world.device, most, options.extra_bytes)
