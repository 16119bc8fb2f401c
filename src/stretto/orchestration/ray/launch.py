"""A run on a Ray cluster: colocated, in ranks that Ray starts, or fully asynchronous."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.ray.cluster import Cluster, asked
from stretto.orchestration.result import RunResult, conclude


def train_on_ray(config: RunConfig, resume: Path | None, replay: Path | None) -> RunResult:
    """Run `config`; see :func:`stretto.train`."""
    with ExitStack() as stack:
        if config.mode.kind == "fully_async":
            from stretto.orchestration.fully_async.launch import train_fully_async

            if replay is not None:
                raise ValueError('recorded rollouts need no engine beside the trainer: set mode.kind = "colocate"')
            return train_fully_async(config, resume, stack)
        result = asyncio.run(_colocate(config, Cluster(config, stack), resume, replay))
    conclude(result)  # here: what a rank prints last may be lost with the cluster
    return result


async def _colocate(config: RunConfig, cluster: Cluster, resume: Path | None, replay: Path | None) -> RunResult:
    ranks = cluster.start_inline(config)
    place = await asked(ranks[0].place.remote(), config.engine.start_timeout_s, "the first process to start")
    runs = [asyncio.ensure_future(_run(rank, place, resume, replay)) for rank in ranks]
    done, pending = await asyncio.wait(runs, return_when=asyncio.FIRST_EXCEPTION)
    for one in pending:
        one.cancel()
    for rank, one in enumerate(runs):
        if one in done and (error := one.exception()) is not None:
            if isinstance(error, ValueError | RunError):
                raise error
            raise RunError(f"rank {rank} failed: {type(error).__name__}: {error}") from error
    return runs[0].result()


async def _run(rank: object, place: object, resume: Path | None, replay: Path | None) -> RunResult:
    """The waits inside of a rank have deadlines of their own."""
    return await asked(rank.run.remote(place, resume, replay), 10.0**7, "a rank")  # type: ignore[attr-defined]
