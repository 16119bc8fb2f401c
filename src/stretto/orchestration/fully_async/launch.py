"""Putting the parts of a fully asynchronous run together."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import torch

from stretto.config import RunConfig
from stretto.data import PromptSet, PromptStream, load_prompts
from stretto.engines.inbox import Bounds
from stretto.orchestration.checkpoint import CheckpointStore
from stretto.orchestration.fully_async.fleet import Fleet
from stretto.orchestration.fully_async.growing import Feeder, Grower, Grown
from stretto.orchestration.fully_async.progressed import Progressed, progressed_at
from stretto.orchestration.fully_async.publishing import Herald
from stretto.orchestration.fully_async.run import FullyAsyncRun, Parts
from stretto.orchestration.fully_async.scoring import RewardWorkers
from stretto.orchestration.fully_async.trainers import TrainerGroup
from stretto.orchestration.live import check_lengths
from stretto.orchestration.model import Model
from stretto.orchestration.queue import InlineQueue
from stretto.orchestration.ray.bus import SampleBus
from stretto.orchestration.ray.cluster import Cluster, asked
from stretto.orchestration.result import RunResult, conclude
from stretto.orchestration.rollouts import Watch
from stretto.orchestration.rundir import claim, create, next_incarnation
from stretto.rewards import RewardPool
from stretto.telemetry.metrics import PhaseTimer
from stretto.telemetry.progress import open_progress
from stretto.telemetry.runlog import RunLog, rewind
from stretto.telemetry.sinks import check_sinks
from stretto.world import World


def train_fully_async(config: RunConfig, resume: Path | None, stack: ExitStack) -> RunResult:
    """Run `config`, or go on in `resume`; see :func:`stretto.train`."""
    world = World(0, 1, torch.device("cpu"))
    check_sinks(config.telemetry)
    model = Model.load(config)
    data = load_prompts(config, model.tokenizer)
    check_lengths(config, model, data)
    with RewardPool(config.reward) as rewards:
        rewards.check(data.train[0].fields.keys())
    run_dir = create(config, world, None) if resume is None else resume
    stack.enter_context(claim(run_dir, world))
    store = CheckpointStore(run_dir, config.checkpoint.keep, world)
    progressed = progressed_at(store, store.latest() if resume is not None else None)
    progressed.incarnation = next_incarnation(run_dir, world)
    cluster = Cluster(config, stack)
    result = asyncio.run(_run(config, world, model, data, cluster, store, progressed, run_dir, stack))
    conclude(result)
    return result


async def _run(
    config: RunConfig,
    world: World,
    model: Model,
    data: PromptSet,
    cluster: Cluster,
    store: CheckpointStore,
    progressed: Progressed,
    run_dir: Path,
    stack: ExitStack,
) -> RunResult:
    rewind(run_dir, progressed.step if progressed.step else -1)
    log = stack.enter_context(RunLog(run_dir, config.telemetry))
    progress = stack.enter_context(open_progress(config.steps))
    rewards = RewardWorkers(config, cluster, progress.note)
    bounds = _bounds(config, data)
    fleet = Fleet(
        cluster,
        (config, cluster.partition, bounds),
        config.placement.engines,
        config.engine.start_timeout_s,
        config.placement.lease_s,
    )
    trainers = TrainerGroup(config, cluster)
    state = store.path(progressed.step) / "state" if progressed.step else None
    await trainers.open(state)
    await rewards.ready()
    bus, queue = SampleBus(cluster.partition), InlineQueue[Grown](progressed.tokens)
    grower = Grower(config, fleet, rewards, lambda replica: herald.lost(replica))
    stream = PromptStream(data.train, config.seed, config.data.shuffle)
    feeder = Feeder(config, fleet, grower, stream, queue)
    herald = Herald(config, fleet, trainers, grower, feeder, progress.note)
    parts = Parts(
        config=config,
        trainers=trainers,
        herald=herald,
        rewards=rewards,
        grower=grower,
        feeder=feeder,
        queue=queue,
        bus=bus,
        heldout=data.heldout,
        checkpoints=store,
        tokenizer=model.tokenizer,
        log=log,
        watch=Watch(PhaseTimer(), progress),
        run_dir=run_dir,
        world=world,
    )
    result = await FullyAsyncRun(parts, progressed).run()
    for replica in fleet.replicas:
        await asked(replica.handle.close.remote(), config.sync.timeout_s, f"{replica.name} to end")
    await rewards.close()
    return result


def _bounds(config: RunConfig, data: PromptSet) -> Bounds:
    samples = [config.rollout.samples_per_prompt, *([config.eval.samples] if data.heldout else [])]
    longest = max(len(prompt.ids) for prompt in (*data.train, *data.heldout))
    return Bounds(longest, config.rollout.max_new_tokens, min(samples))
