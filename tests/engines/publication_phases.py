"""Acting in the midst of a publication into a server, and a trainer that is killed there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine_helpers import nudge

from stretto.sync.publication import Publisher
from stretto.sync.transports import EngineTransport
from stretto.types import Version

PHASES = ("called in", "buckets travel", "loading", "before commit")
FEW_BYTES = 1 << 16
"""Of the slots together, so that a publication has hundreds of buckets."""


def at_phase(transport: EngineTransport, phase: str, act: Callable[[], None]) -> None:
    """Have `act` called once in the next publication, when that phase is reached."""
    session: Any = transport._session
    owner, name, call = {
        "called in": (session.receivers, "ask", 1),  # the first thing asked is to receive
        "buckets travel": (session._link, "start", 9),
        "loading": (session.receivers, "answers", 1),  # every bucket is unpacked
        "before commit": (transport, "verify", 1),
    }[phase]
    usual, calls = getattr(owner, name), 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return usual(*arguments)

    setattr(owner, name, counted)


def kill_self() -> None:
    """As the kernel does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(directory: Path, url: str | None, phase: str, log: Path, pipe: Connection) -> None:
    """A trainer that publishes its weights, tells its server's processes, and dies in its next publication."""
    import torch
    from servers import engine_transport, processes_of, vllm

    from stretto.models.checkpoint import load_model

    torch.set_num_threads(1)
    kind = vllm()
    engine = kind.start(directory, url=url, options={} if url else kind.options, log=log)
    reference: Any = load_model(directory, torch.float32).eval()
    transport = engine_transport(kind, directory, engine, reference, extra_bytes=FEW_BYTES)
    publisher = Publisher(engine, transport)
    publisher.open(Version(1, 0))
    publisher.close()
    pipe.send((engine.base_url, [] if url else processes_of(engine)))
    at_phase(transport, phase, kill_self)
    publisher.open(Version(1, 1))
    nudge(reference, seed=1)
    publisher.close()
    pipe.send("was not killed")
