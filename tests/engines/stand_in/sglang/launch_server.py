"""The server."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import pickle
import signal
import sys
from typing import Any

import faults
from aiohttp import web

from sglang.srt.server_args import ServerArgs

TOKEN_S = 0.005


class Server:
    """One event loop; a request is a coroutine that wakes for every token."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.paused = False
        self.calls: list[str] = []

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        fault, sampling = asked["input_ids"][0], asked["sampling_params"]
        if fault == faults.REFUSES:
            return web.json_response({"error": {"message": "not today"}}, status=503)
        if fault == faults.DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        self.running.add(asked["rid"])
        try:
            ids, finish = await self._tokens(asked, sampling)
        finally:
            self.running.discard(asked["rid"])
        return web.json_response(_answer(fault, ids, finish))

    async def _tokens(self, asked: dict[str, Any], sampling: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        ids: list[int] = []
        while len(ids) < sampling["max_new_tokens"]:
            await asyncio.sleep(3600 if asked["input_ids"][0] == faults.HANGS else TOKEN_S)
            if asked["rid"] in self.aborted or asked["input_ids"][0] == faults.ABORTS:
                return ids, {"type": "abort", "message": "Aborted"}
            assert not self.paused, "a token was computed while paused"
            ids.append(faults.token(sampling["sampling_seed"], len(asked["input_ids"]) + len(ids)))
            if len(ids) == sampling["max_new_tokens"]:
                break  # it does not look at the last allowed token
            if not sampling["ignore_eos"] and ids[-1] in sampling["stop_token_ids"]:  # it ignores both or neither
                return ids, {"type": "stop", "matched": ids[-1]}
        return ids, {"type": "length", "length": len(ids)}

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response(vars(self.options))

    async def pause(self, _: web.Request) -> web.Response:
        assert not self.running, "a request would be retracted, and carry two versions"
        self.paused = True
        return web.json_response({"message": "Generation paused successfully."})

    async def resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"message": "Generation continued successfully."})

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["load_format"] in self.options.custom_weight_loader
        assert len(asked["serialized_named_tensors"]) == self.options.tp_size
        ((_, payload),) = pickle.loads(base64.b64decode(asked["serialized_named_tensors"][0]))
        text = bytes(payload.tolist()).decode()
        done = text != "fail"
        body = {"success": done, "message": f"entered with {text}"}
        return web.json_response(body, status=200 if done else 400)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


def _answer(fault: int, ids: list[int], finish: dict[str, Any]) -> dict[str, Any]:
    logprobs: list[list[Any]] = [[-0.5, one, None] for one in ids]
    if fault == faults.NO_REASON:
        finish = None  # type: ignore[assignment]
    if fault == faults.STOPS_FOR_NOTHING:
        finish = {"type": "stop", "matched": ids[-1]}
    if fault == faults.TOO_SHORT:
        ids, logprobs = ids[:-1], logprobs[:-1]
    if fault == faults.LOGPROB_MISSING:
        logprobs = logprobs[:-1]
    if fault == faults.NOT_FINITE:
        logprobs[-1][0] = float("nan")
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, "output_token_logprobs": logprobs}}


def main() -> None:
    """As `python -m sglang.launch_server`."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args()
    if options.crash:
        sys.exit(f"it crashes: {options.crash}")
    server = Server(options)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", server.health),
            web.post("/generate", server.generate),
            web.post("/abort_request", server.abort),
            web.get("/server_info", server.info),
            web.post("/pause_generation", server.pause),
            web.post("/continue_generation", server.resume),
            web.post("/update_weights_from_tensor", server.update),
        ]
    )
    web.run_app(app, host=options.host, port=options.port, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
