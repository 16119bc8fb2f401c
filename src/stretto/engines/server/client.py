"""HTTP to one server, from a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.engines.base import EngineError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 10.0
# A request on a connection that the server just gave up would be lost. So the server is told to keep one for longer
# than this side does, and longer than a busy machine stalls either; an adopted one is left with its own time (5 s).
_KEEP_ALIVE_S = 2.0
KEEP_ALIVE_S = "60"
_SHOWN = 2000


@dataclass(frozen=True)
class Call:
    """A request: POST with a JSON body, or GET."""

    path: str
    body: Mapping[str, Any] | None = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    get: bool = False


class Client:
    """Calls of `name` (for messages) at `base_url`; `obituary` says what became of the server that does not answer."""

    def __init__(self, name: str, base_url: str, obituary: Callable[[], str]):
        self.name, self.base_url = name, base_url
        self._obituary = obituary
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"{name}-client", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self.submit(self._open()).result()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it in the client's thread. EngineError once that has ended."""
        if self.loop.is_closed():
            coroutine.close()
            raise EngineError(f"the engine is closed, and with it its connection to {self.name}")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, call: Call, timeout_s: float) -> Any:
        """What the server answers, decoded; called from any thread but the client's. EngineError as `request`."""
        return self.submit(self.request(call, timeout_s)).result()

    async def request(self, call: Call, timeout_s: float | None) -> Any:
        """What the server answers, decoded (None for nothing).

        Raises EngineError with what the server said when it refuses, is not there, or does not answer in time.
        """
        where = f"{self.name} at {self.base_url}{call.path}"
        try:
            async with asyncio.timeout(timeout_s):
                status, text = await self._send(call)
        except TimeoutError:
            raise EngineError(f"{where} did not answer within {timeout_s:g} s") from None
        except OSError as error:  # aiohttp's connection errors are OSErrors or ClientErrors
            raise await self._gone(where, error) from error
        except Exception as error:
            import aiohttp

            if not isinstance(error, aiohttp.ClientError):
                raise
            raise await self._gone(where, error) from error
        if status != 200:
            raise EngineError(f"{where} answered {status}: {text[:_SHOWN]}")
        return _decoded(text, where)

    def close(self) -> None:
        """Cut off what is under way and end the thread."""
        self.submit(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            base_url=self.base_url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def _send(self, call: Call) -> tuple[int, str]:
        sending = (
            self._session.get(call.path, params=call.query)
            if call.get
            else self._session.post(call.path, params=call.query, json=call.body)
        )
        async with sending as answer:
            return answer.status, await answer.text()

    async def _gone(self, where: str, error: Exception) -> EngineError:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return EngineError(f"{where} is not to be reached ({said}){await asyncio.to_thread(self._obituary)}")


def _decoded(text: str, where: str) -> Any:
    import json

    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        # Some calls are answered with a sentence, which nobody reads.
        return text if not text.lstrip().startswith(("{", "[")) else _malformed(text, where)


def _malformed(text: str, where: str) -> Any:
    raise EngineError(f"{where} answered with something that is not JSON: {text[:_SHOWN]}")
