"""A process group that lives as long as the tests: starting its processes costs seconds, a job milliseconds."""

from __future__ import annotations

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

    def __init__(self, size: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, str(directory / "store")), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What the job returns on each rank. A rank's exception fails the test with its traceback."""
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = [self._answer(rank, job.__name__) for rank in range(len(self._pipes))]
        for rank, (failed, result) in enumerate(answers):
            assert not failed, f"rank {rank}: {result}"
        return [result for _, result in answers]

    def _answer(self, rank: int, job: str) -> tuple[bool, Any]:
        assert self._pipes[rank].poll(_DEADLINE_S), f"rank {rank} gave no answer to {job} in {_DEADLINE_S:.0f} s"
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    """Do jobs until the other end is closed (also by the death of the test process)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from stretto.world import World

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=_DEADLINE_S / 2)
    )
    world = World(rank, size, torch.device("cpu"))
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            pipe.send((False, job(world, *args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
