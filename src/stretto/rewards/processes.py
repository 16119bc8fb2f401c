"""The worker processes: started, watched, replaced and ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from stretto.rewards import worker

_LIVENESS_POLL_S = 1.0


class CallTimeout(Exception):
    """A call passed its own deadline; its worker was killed."""


class WorkerDied(Exception):
    """The worker of a call ended; the text says how."""


class Call(NamedTuple):
    """A call on its way, and the pool it was given to."""

    future: Future[Any]
    pool: ProcessPool


class Workers:
    """`count` processes that have loaded `rewards` (pairs of spec and short name)."""

    def __init__(self, count: int, rewards: Sequence[tuple[str, str]]) -> None:
        self._count = count
        self._rewards = tuple(rewards)
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Call:
        """Queue a call; `timeout_s` counts from when a worker takes it. Raises RuntimeError once closed."""
        with self._lock:
            self._refuse_closed()
            if not self._pool.active:
                self._stop()
                self._start()
            return Call(self._pool.schedule(function, args=args, timeout=timeout_s), self._pool)

    def wait(self, call: Call, deadline: float) -> Any:
        """What the call returned or raised. `deadline` is a time.monotonic().

        Raises CallTimeout, WorkerDied, BrokenProcessPool (all workers were lost, call again), TimeoutError (deadline).
        """
        while not call.future.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("deadline")
            alive = call.pool.active
            try:
                call.future.exception(timeout=min(left, _LIVENESS_POLL_S))
            except TimeoutError:
                self._refuse_closed()
                # Calls that no worker had been given are forgotten by a pool that broke.
                if not alive:
                    raise BrokenProcessPool("the reward workers were lost") from None
        return _result(call.future)

    def close(self) -> None:
        """End every worker; calls that are not finished are given up. Returns within seconds, may be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._stop()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")

    def _start(self) -> None:
        self._pool = ProcessPool(
            max_workers=self._count,
            initializer=worker.prepare,
            initargs=(os.getpid(), self._rewards),
            context=multiprocessing.get_context("spawn"),
        )
        self._done = threading.Event()
        started: Future[None] = Future()
        self._keeper = threading.Thread(
            target=_keep, args=(self._pool, started, self._done), name="reward-keeper", daemon=True
        )
        self._keeper.start()
        started.result()

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._done.set()
        self._keeper.join()


def _keep(pool: ProcessPool, started: Future[None], done: threading.Event) -> None:
    """Start the pool's processes from a thread that lives as long as they do.

    The kernel's parent-death signal fires when the *thread* that started a process ends. And processes inherit this
    thread's blocked SIGINT, so that Ctrl-C cannot interrupt one that is still starting; so do the pool's own threads.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert pool.active  # asking starts it
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    done.wait()


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except TimeoutError:
        raise CallTimeout from None
    except ProcessExpired as error:
        code = error.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise WorkerDied(f"the worker process {how}") from None
