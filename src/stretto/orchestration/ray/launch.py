"""A run on a Ray cluster: colocated, in ranks that Ray starts, or fully asynchronous."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.ray.cluster import Cluster, all_asked, asked
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
    runs = [rank.run.remote(place, resume, replay) for rank in ranks]
    return (await all_asked(runs, None, "rank", RunError))[0]
