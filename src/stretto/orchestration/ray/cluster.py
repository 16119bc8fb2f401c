"""A Ray cluster with TransferQueue on it, and room for the parts of a run."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.ray.part import end_process

_QUEUE_CPUS = 3
"""Logical ones: TransferQueue's controller and its two storage units take one each, and wait for ever for them."""
_PLACED_S = 120.0


class Cluster:
    """A local cluster for this run alone, or the one at `launch.address`; `stack` leaves it.

    Raises ValueError when Ray is missing, and, with the numbers, when the cluster cannot hold the run.
    """

    def __init__(self, config: RunConfig, stack: ExitStack):
        self._config = config
        self._where: dict[Any, Any] = {}
        self.partition = f"stretto-{uuid.uuid4().hex[:12]}"
        self._bundles = _bundles(config, gpus=False)
        asynchronous = config.mode.kind == "fully_async"
        ray = _import_ray(asynchronous)
        if config.launch.address is None:
            ray.init(
                num_cpus=len(self._bundles) + _QUEUE_CPUS,
                num_gpus=torch.cuda.device_count(),
                include_dashboard=False,
                log_to_driver=not asynchronous or bool(os.environ.get("STRETTO_DEBUG")),
                logging_level="ERROR",
                namespace=self.partition,
            )
        else:
            ray.init(config.launch.address, namespace=self.partition, logging_level="ERROR")
        stack.callback(ray.shutdown)
        self._bundles = _bundles(config, gpus=ray.cluster_resources().get("GPU", 0) > 0)
        _check_room(self._bundles, ray.cluster_resources(), config)
        if asynchronous:
            _start_queue(stack)
        self._group = self._place(ray)

    def start_trainers(self, *arguments: Any) -> list[Any]:
        """A process for every rank of the trainer, told `arguments`, its rank and their number."""
        from stretto.orchestration.ray.trainer_rank import TrainerRank

        size = self._config.placement.trainers
        groups = {"publish": 1}
        return [
            self._start(TrainerRank, rank, (*arguments, rank, size), concurrency_groups=groups) for rank in range(size)
        ]

    def start_inline(self, *arguments: Any) -> list[Any]:
        """A process for every rank of the inline loop, told `arguments`, its rank and their number."""
        from stretto.orchestration.ray.inline_rank import InlineRank

        size = self._config.placement.trainers
        return [self._start(InlineRank, rank, (*arguments, rank, size)) for rank in range(size)]

    def start_engine(self, slot: int, *arguments: Any) -> Any:
        """A process for replica `slot` of the engine."""
        from stretto.orchestration.ray.engine_replica import EngineReplica

        return self._start(EngineReplica, self._config.placement.trainers + slot, arguments, max_concurrency=1000)

    def start_rewards(self, slot: int, *arguments: Any) -> Any:
        """A process for reward worker `slot`."""
        from stretto.orchestration.ray.reward_worker import RewardWorker

        placement = self._config.placement
        return self._start(RewardWorker, placement.trainers + placement.engines + slot, arguments, max_concurrency=8)

    def kill(self, handle: Any) -> None:
        """End a process, however it is: dead, busy or stopped."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with suppress(Exception):  # where it never said where it is, it never began
            pid, node = ray.get(self._where.pop(handle), timeout=1.0)
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.get(ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=20.0)
        with suppress(Exception):
            ray.kill(handle)

    def _start(self, part: type, bundle: int, arguments: Sequence[Any], **options: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._bundles[bundle]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        needed = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
        actor = ray.remote(**needed, **options)(part).options(scheduling_strategy=place, max_restarts=0)
        handle = actor.remote(*arguments)
        self._where[handle] = handle.where.remote()
        return handle

    def _place(self, ray: Any) -> Any:
        from ray.exceptions import GetTimeoutError

        group = ray.util.placement_group(self._bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=_PLACED_S)
        except GetTimeoutError:
            raise ValueError(
                f"the cluster did not give {_told(self._bundles)} within {_PLACED_S:g} s; it may be busy with another "
                f"run: free are {ray.available_resources()}"
            ) from None
        return group


async def asked(reference: Any, timeout_s: float | None, what: str) -> Any:
    """The answer of an actor. Raises TimeoutError that says for `what` it was waited, or what the actor raised.

    None leaves the deadline to the caller, or to what the actor does.
    """
    from ray.exceptions import RayTaskError

    async def answer() -> Any:
        return await reference

    try:
        return await asyncio.wait_for(answer(), timeout_s)
    except TimeoutError:
        raise TimeoutError(f"waited {timeout_s:g} s for {what}") from None
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


def _start_queue(stack: ExitStack) -> None:
    import transfer_queue
    from omegaconf import OmegaConf

    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
    stack.callback(transfer_queue.close)


async def all_asked(
    references: Sequence[Any], timeout_s: float | None, who: str, failed: Callable[[str], Exception]
) -> list[Any]:
    """What the ranks of a group answer, each of them called `who` and its number; the first that fails ends the wait.

    Raises its ValueError or RunError as it is, and anything else as what `failed` makes of the words.
    """
    said = [asyncio.ensure_future(asked(one, timeout_s, f"{who} {rank}")) for rank, one in enumerate(references)]
    done, pending = await asyncio.wait(said, return_when=asyncio.FIRST_EXCEPTION)
    for one in pending:
        one.cancel()
    for rank, one in enumerate(said):
        if one in done and (error := one.exception()) is not None:
            if isinstance(error, ValueError | RunError):
                raise error
            raise failed(f"{who} {rank} failed: {type(error).__name__}: {error}") from error
    return [one.result() for one in said]


def _bundles(config: RunConfig, *, gpus: bool) -> list[dict[str, float]]:
    """What each process needs: those of the trainer, then the engines, then the reward workers."""
    placement, asynchronous = config.placement, config.mode.kind == "fully_async"
    trainer = {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {})
    engine = {"CPU": 1.0} | ({"GPU": float(config.engine.tp)} if gpus else {})
    parts = [trainer] * placement.trainers
    if asynchronous:
        parts += [engine] * placement.engines + [{"CPU": 1.0}] * config.reward.workers
    return parts


def _check_room(bundles: Sequence[dict[str, float]], there: dict[str, float], config: RunConfig) -> None:
    needs = {kind: sum(one.get(kind, 0.0) for one in bundles) for kind in ("CPU", "GPU")}
    needs["CPU"] += _QUEUE_CPUS if config.mode.kind == "fully_async" else 0
    short = [f"{needs[kind]:g} {kind}s of {there.get(kind, 0):g}" for kind in needs if needs[kind] > there.get(kind, 0)]
    if short:
        raise ValueError(
            f"the run needs {' and '.join(short)} of the cluster: {_told(bundles)}, and {_QUEUE_CPUS} CPUs for "
            "TransferQueue; lower placement.trainers, placement.engines or reward.workers, or take a larger cluster"
        )


def _told(bundles: Sequence[dict[str, float]]) -> str:
    cpus, gpus = (sum(one.get(kind, 0.0) for one in bundles) for kind in ("CPU", "GPU"))
    return f"{len(bundles)} processes with {cpus:g} CPUs and {gpus:g} GPUs"


def _import_ray(asynchronous: bool) -> Any:
    try:
        import ray

        if asynchronous:
            import transfer_queue  # noqa: F401
    except ImportError as error:
        raise ValueError(f'launch.backend = "ray" needs {error.name}: pip install "stretto[ray]"') from error
    return ray
