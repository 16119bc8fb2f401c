"""A process group that lives as long as a file of tests: starting its processes costs seconds, a job milliseconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_DEADLINE_S = 180.0


class Ranks:
    """`size` processes joined over gloo. Each runs the same `job(world, *args)`, a function of an importable module."""

    def __init__(self, size: int, directory: Path, *, group_timeout_s: float = _DEADLINE_S / 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            args = (there, rank, size, str(directory / "store"), group_timeout_s)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What the job returns on each rank. A rank's exception fails the test with its traceback."""
        self.ask(job, *args)
        answers = [self.answer(rank) for rank in range(len(self._pipes))]
        for rank, (failed, result) in enumerate(answers):
            assert not failed, f"rank {rank}: {result}"
        return [result for _, result in answers]

    def ask(self, job: Callable[..., Any], *args: Any) -> None:
        """Have every rank begin the job."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((job, args))
            except BrokenPipeError:
                self._ended(rank, f"before {job.__name__}")

    def answer(self, rank: int) -> tuple[bool, Any]:
        """Whether the job failed on a rank, and its traceback or what it gave back."""
        assert self._pipes[rank].poll(_DEADLINE_S), f"rank {rank} gave no answer in {_DEADLINE_S:.0f} s"
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._ended(rank, "in its job")
            raise

    def _ended(self, rank: int, when: str) -> None:
        process = self._processes[rank]
        process.join(10)
        raise AssertionError(f"rank {rank} ended {when} with exit code {process.exitcode} (-9: killed, by whom?)")

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(pipe: Connection, rank: int, size: int, store: str, group_timeout_s: float) -> None:
    """Do jobs until the other end is closed (also by the death of the test process)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from stretto.world import World

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=group_timeout_s),
    )
    world = World(rank, size, torch.device("cpu"))
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            dist.destroy_process_group()
            return
        try:
            answer = (False, job(world, *args))
        except Exception:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
        del job, args, answer
        gc.collect()  # a trainer is full of cycles, and its process groups hold threads
