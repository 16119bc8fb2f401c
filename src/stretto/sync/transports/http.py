"""Pushed to a receiver of ours beside each engine, on whatever host that is; read by the engine as from a disk."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass

from stretto.sync.parcels.calling import DIGEST, KEY, SESSION, Caller, Refused
from stretto.sync.parcels.manifest import Label, digest_of
from stretto.sync.session import Destination, Source
from stretto.sync.transports.files import FileOptions, FilesTransport
from stretto.world import World

_LACKS, _NOTHING = 409, 404


class HttpTransport(FilesTransport):
    """See :class:`~stretto.sync.transports.files.FilesTransport`; `urls` are the receivers, one for each engine.

    The key that they ask for is in the environment.
    """

    def __init__(
        self, world: World, source: Source, destination: Destination, options: FileOptions, urls: Sequence[str]
    ):
        super().__init__("http", world, source, destination, options, lambda: _Http(urls, options.timeout_s))


@dataclass(frozen=True)
class RemotePlace:
    """A directory on an engine's host, which its receiver speaks for."""

    directory: str
    caller: Caller
    session: str

    def answer(self, name: str, answer: str) -> str | None:
        """See :class:`~stretto.sync.parcels.places.Place`."""
        try:
            return self.caller.call("GET", f"/parcels/{name}/answers/{answer}", headers={SESSION: self.session})
        except Refused as error:
            if error.status == _NOTHING:
                return None
            raise


class _Http:
    """Some receivers, each with the same parcels."""

    def __init__(self, urls: Sequence[str], timeout_s: float):
        key = os.environ.get(KEY, "").strip()
        if not key:
            raise ValueError(f"there is no key: set {KEY}, here and where the receiver runs, to a secret of your own")
        self.count, self._session = len(urls), secrets.token_hex(16)
        self._callers = [Caller(url, key, timeout_s) for url in urls]
        self._pool = ThreadPoolExecutor(len(urls))
        self._directories = self._open()

    def begin(self, name: str, bases: Sequence[Label]) -> bool:
        """See :class:`~stretto.sync.parcels.packing.Shelf`. A receiver that was started anew is opened again."""
        known = json.dumps([asdict(one) for one in bases]).encode()
        try:
            self._all("POST", f"/parcels/{name}", known)
        except Refused as error:
            if error.status != _LACKS:
                raise
            self._directories = self._open()
            if bases:
                return False
            self._all("POST", f"/parcels/{name}", known)
        return True

    def put(self, name: str, file: str, body: bytes) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        self._all("PUT", f"/parcels/{name}/{file}", body, {DIGEST: digest_of(body)})

    def finish(self, name: str, manifest: bytes) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        self._all("POST", f"/parcels/{name}/finish", manifest)

    def keep(self, names: Sequence[str]) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        self._all("POST", "/keep", json.dumps(names).encode())

    def places(self, engines: int) -> Sequence[RemotePlace]:
        """See :class:`~stretto.sync.transports.files.Places`."""
        if engines != self.count:
            raise ValueError(f"sync.receivers has {self.count} addresses for {engines} engines; name one for each")
        return [
            RemotePlace(directory, caller, self._session)
            for directory, caller in zip(self._directories, self._callers, strict=True)
        ]

    def close(self) -> None:
        """See :class:`~stretto.sync.parcels.packing.Shelf`."""
        with suppress(RuntimeError):  # it removes them itself when it ends
            self._all("DELETE", f"/sessions/{self._session}")
        self._pool.shutdown()

    def _open(self) -> list[str]:
        """Have all begin anew; returns their directories."""
        return [json.loads(one)["directory"] for one in self._all("POST", f"/sessions/{self._session}")]

    def _all(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> list[str]:
        """What all receivers answer, called at the same time. Raises RuntimeError as a call does."""
        own = {SESSION: self._session, **(headers or {})}
        return list(self._pool.map(lambda one: one.call(method, path, body, own), self._callers))
