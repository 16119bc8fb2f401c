"""The receiver's HTTP: one trainer at a time begins parcels, puts their files, and has them finished.

| call | does |
|---|---|
| `POST /sessions/ID` | begins anew for the trainer ID: all parcels are removed; answers with the directory |
| `POST /parcels/NAME` | begins a parcel; the body lists those that it will be based on |
| `PUT /parcels/NAME/FILE` | one safetensors file, streamed to disk; its digest is in a header |
| `POST /parcels/NAME/finish` | the body is the manifest |
| `GET /parcels/NAME/answers/ANSWER` | what a rank of the engine left in the parcel, 404 when nothing |
| `POST /keep` | the body lists the parcels to keep |
| `DELETE /sessions/ID` | removes all parcels |

Every call has the key; all but the first, the session. 401: another key; 409: a base, or the session, is not there (any
more); 423: another trainer has taken over; 507: no room.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import signal
from collections.abc import Awaitable, Callable

from aiohttp import web

from stretto.sync.parcels.calling import DIGEST, KEY, SESSION
from stretto.sync.parcels.folder import Folder, answer_in
from stretto.sync.parcels.manifest import Label

_CHUNK = 2**20
_SMALL = 2**28
"""Bytes that a body may have which is not a file: the manifest of a large model has tens of megabytes."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """Serves one folder to whoever has the key."""

    def __init__(self, folder: Folder, key: str):
        self._folder, self._key = folder, key
        self._session: str | None = None

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=_SMALL, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/sessions/{session}", self._open),
                web.delete("/sessions/{session}", self._close),
                web.post("/keep", self._keep),
                web.post("/parcels/{name}", self._begin),
                web.post("/parcels/{name}/finish", self._finish),
                web.put("/parcels/{name}/{file}", self._put),
                web.get("/parcels/{name}/answers/{answer}", self._answer),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key and the session, and errors in words."""
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {self._key}".encode()):
            return web.Response(status=401, text=f"the receiver has another key ({KEY})")
        if not request.path.startswith("/sessions/"):
            if self._session is None:
                return web.Response(status=409, text="the receiver was started anew")
            if request.headers.get(SESSION) != self._session:
                return web.Response(status=423, text="another trainer has taken over the receiver")
        try:
            return await handler(request)
        except (ValueError, TypeError, KeyError) as error:
            return web.Response(status=400, text=str(error))
        except OSError as error:
            text = f"cannot write to {self._folder.root}: {error.strerror}"
            async for _ in request.content.iter_chunked(_CHUNK):  # who still sends would not hear the answer
                pass
            return web.Response(status=507 if error.errno in _FULL else 500, text=text)

    async def _open(self, request: web.Request) -> web.Response:
        self._folder.clear()
        self._session = request.match_info["session"]
        return web.json_response({"directory": str(self._folder.root)})

    async def _close(self, request: web.Request) -> web.Response:
        if self._session == request.match_info["session"]:
            self._folder.clear()
            self._session = None
        return web.Response()

    async def _begin(self, request: web.Request) -> web.Response:
        bases = [Label(**one) for one in json.loads(await request.read())]
        if missing := [one.name for one in bases if not self._folder.has(one)]:
            return web.Response(status=409, text=f"{self._folder.root} lacks {', '.join(missing)}")
        self._folder.begin(request.match_info["name"])
        return web.Response()

    async def _put(self, request: web.Request) -> web.Response:
        """Never whole in memory."""
        path, digest = self._folder.file(request.match_info["name"], request.match_info["file"]), hashlib.sha256()
        with open(path, "wb") as file:
            async for chunk in request.content.iter_chunked(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != request.headers.get(DIGEST):
            path.unlink()
            return web.Response(status=400, text=f"{path.name} changed on the way (its digest differs)")
        return web.Response()

    async def _finish(self, request: web.Request) -> web.Response:
        name, manifest = request.match_info["name"], await request.read()
        await asyncio.to_thread(self._folder.finish, name, manifest)
        return web.Response()

    async def _keep(self, request: web.Request) -> web.Response:
        self._folder.keep(json.loads(await request.read()))
        return web.Response()

    async def _answer(self, request: web.Request) -> web.Response:
        said = answer_in(self._folder.root, request.match_info["name"], request.match_info["answer"])
        return web.Response(status=404) if said is None else web.Response(text=said)


def serve(folder: Folder, key: str, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; prints the address when ready. OSError when the address is taken."""
    asyncio.run(_serve(folder, key, host, port))


async def _serve(folder: Folder, key: str, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(Receiver(folder, key).app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        print(f"receives parcels at http://{bound[0]}:{bound[1]} for {folder.root}", flush=True)
        await ended.wait()
    finally:
        await runner.cleanup()
