"""Through a directory that the trainer and the engines see: written aside, renamed, read by every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stretto.sync.parcels.folder import Folder
from stretto.sync.parcels.manifest import Label
from stretto.sync.parcels.places import LocalPlace
from stretto.sync.session import Destination, Source
from stretto.sync.transports.files import FileOptions, FilesTransport
from stretto.world import World


class DiskTransport(FilesTransport):
    """See :class:`~stretto.sync.transports.files.FilesTransport`; `directory` is this run's alone while it lives."""

    def __init__(self, world: World, source: Source, destination: Destination, options: FileOptions, directory: Path):
        super().__init__("disk", world, source, destination, options, lambda: _Disk(directory.resolve()))


class _Disk:
    """A folder that is seen from here."""

    count = 1

    def __init__(self, root: Path):
        self._folder = Folder(root)

    def begin(self, name: str, bases: Sequence[Label]) -> bool:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        if not all(self._folder.has(one) for one in bases):
            return False
        with self._named():
            self._folder.begin(name)
        return True

    def put(self, name: str, file: str, body: bytes) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        with self._named():
            self._folder.file(name, file).write_bytes(body)

    def finish(self, name: str, manifest: bytes) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        with self._named():
            self._folder.finish(name, manifest)

    def keep(self, names: Sequence[str]) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        self._folder.keep(names)

    def places(self, engines: int) -> Sequence[LocalPlace]:
        """See :class:`~stretto.sync.transports.files.Places`: the same for all."""
        return [LocalPlace(str(self._folder.root))] * engines

    def close(self) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        self._folder.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(f"cannot write to {self._folder.root} (sync.directory): {error.strerror}") from error
