"""HTTP to a receiver, with deadlines."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

KEY = "STRETTO_RECEIVER_KEY"
"""The variable of the environment with the secret that both sides know."""
SESSION, DIGEST = "Stretto-Session", "Stretto-Digest"
"""Headers: whose parcels these are, and the digest of a file."""

_CHUNK = 2**20
_SHOWN = 2000


class Refused(RuntimeError):
    """The receiver answered with something else than 200."""

    def __init__(self, status: int, said: str):
        super().__init__(said)
        self.status = status


@dataclass(frozen=True)
class Caller:
    """Calls the receiver at `url`, as whoever has `key`; each call ends within `timeout_s`."""

    url: str
    key: str = field(repr=False)
    timeout_s: float

    def call(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> str:
        """What it answers. Raises Refused when it says no, RuntimeError when it does not answer in time."""
        parts, deadline = urlsplit(self.url), time.monotonic() + self.timeout_s
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        own = {"Authorization": f"Bearer {self.key}", "Content-Length": str(len(body)), **(headers or {})}
        try:
            connection.request(method, parts.path.rstrip("/") + path, self._paced(connection, body, deadline), own)
            self._set_deadline(connection, deadline)
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
        except TimeoutError as error:
            raise RuntimeError(f"the receiver at {self.url} did not answer within {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"the receiver at {self.url} is not to be reached ({error!r})") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(answer.status, f"the receiver at {self.url} answered {answer.status}: {said[:_SHOWN]}")
        return said

    def _paced(self, connection: http.client.HTTPConnection, body: bytes, deadline: float) -> Iterator[memoryview]:
        """The body in chunks, each of which has to be taken before the deadline."""
        view = memoryview(body)
        for begin in range(0, len(view), _CHUNK):
            self._set_deadline(connection, deadline)
            yield view[begin : begin + _CHUNK]

    def _set_deadline(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
