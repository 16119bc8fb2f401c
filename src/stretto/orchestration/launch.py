"""Putting the parts of a run together, inline: one process, or one SPMD group under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.config import RunConfig, load_config
from stretto.data import PromptSet, PromptStream, load_prompts
from stretto.engines.embedded import EmbeddedEngine
from stretto.models import checkpoint as models
from stretto.orchestration.checkpoint import CheckpointStore
from stretto.orchestration.colocate import ColocatedRun, Parts, Progressed, RunResult
from stretto.orchestration.evaluate import Evaluator
from stretto.orchestration.queue import TokenCounts
from stretto.orchestration.rollouts import RolloutPhase, Watch
from stretto.orchestration.rundir import claim, create
from stretto.orchestration.sources import LiveSource, ReplaySource
from stretto.rewards import RewardPool
from stretto.sync.layout import check_complete
from stretto.sync.publication import Publisher
from stretto.sync.transports import AliasTransport, LocalTransport
from stretto.sync.transports.alias import can_alias
from stretto.telemetry.metrics import PhaseTimer
from stretto.telemetry.progress import open_progress
from stretto.telemetry.report import write_report
from stretto.telemetry.runlog import RunLog, rewind
from stretto.trainers import Trainer
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Version
from stretto.world import World, join_world, leave_world


def train(config: RunConfig, resume: Path | None = None, replay: Path | None = None) -> RunResult:
    """Run `config` in a new run directory; with `resume`, continue that one; with `replay`, train on recorded rollouts.

    Raises ValueError for bad input (before the first step), RunError when a started run has to stop.
    """
    if resume is not None:
        return _go_on(config, resume)
    with _world() as world:
        return _run(config, world, replay, lambda: create(config, world), Progressed())


def resume(run_dir: Path) -> RunResult:
    """Continue the run in `run_dir` from its newest checkpoint, or from the start when it has none."""
    if not (run_dir / "config.toml").is_file():
        raise ValueError(f"{run_dir} is not a run directory: it has no config.toml")
    return _go_on(load_config(run_dir / "config.toml"), run_dir)


def _go_on(config: RunConfig, run_dir: Path) -> RunResult:
    with _world() as world:
        store = CheckpointStore(run_dir, config.checkpoint.keep, world)
        step = store.latest()
        progressed = Progressed()
        if step is not None:
            saved = store.read(step)
            saved["tokens"] = TokenCounts(**saved["tokens"]) if world.first else TokenCounts()
            saved["incarnation"] += 1
            progressed = Progressed(**saved)
        marker = run_dir / "replay.txt"
        replay = Path(marker.read_text()) if marker.is_file() else None
        return _run(config, world, replay, lambda: run_dir, progressed)


@contextmanager
def _world() -> Iterator[World]:
    world = join_world()
    try:
        yield world
    finally:
        leave_world()


def _run(
    config: RunConfig, world: World, replay: Path | None, directory: Callable[[], Path], progressed: Progressed
) -> RunResult:
    """Check all input, then make (or claim) the run directory, then turn the loop."""
    model = Model.load(config)
    with ExitStack() as stack:
        recorded = ReplaySource(config, world, replay) if replay is not None else None
        if recorded is not None:
            config = config.model_copy(update={"steps": recorded.steps})
        data = None if recorded is not None else load_prompts(config, model.tokenizer)
        rewards = None if data is None else stack.enter_context(_rewards(config, data))
        trainer = FSDPTrainer(model.directory, config, world)
        run_dir = directory()
        stack.enter_context(claim(run_dir, world))
        if progressed.step:
            trainer.load(CheckpointStore(run_dir, config.checkpoint.keep, world).path(progressed.step) / "state")
        if world.first:
            rewind(run_dir, progressed.step if progressed.step else -1)
            if replay is not None:
                (run_dir / "replay.txt").write_text(str(replay.resolve()))
        progress = stack.enter_context(open_progress(config.steps, enabled=world.first))
        parts = Parts(
            config=config,
            world=world,
            trainer=trainer,
            source=recorded,  # type: ignore[arg-type]  # filled below
            publisher=None,
            evaluator=None,
            checkpoints=CheckpointStore(run_dir, config.checkpoint.keep, world),
            tokenizer=model.tokenizer,
            log=stack.enter_context(RunLog(run_dir, config.telemetry)) if world.first else None,
            watch=Watch(PhaseTimer(), progress),
            run_dir=run_dir,
        )
        if data is not None and rewards is not None:
            _add_engine(parts, model, data, rewards, stack)
        result = ColocatedRun(parts, progressed).run()
    if world.first:
        _conclude(result)
    return result


@dataclass(frozen=True)
class Model:
    """The checkpoint that a run starts from."""

    directory: Path
    tokenizer: Any
    max_length: int

    @classmethod
    def load(cls, config: RunConfig) -> Model:
        """Find it, read its configuration and its tokenizer."""
        directory = models.resolve(config.model.path)
        longest = models.longest_sequence(models.load_config(directory), config.model.max_length)
        return cls(directory, models.load_tokenizer(directory), longest)

    def engine(self, config: RunConfig, world: World) -> EmbeddedEngine:
        """An embedded engine for this model, without weights yet."""
        return EmbeddedEngine(
            self.directory,
            self.tokenizer,
            device=world.device,
            eos_ids=models.end_of_sequence_ids(self.directory, self.tokenizer),
            max_length=self.max_length,
            max_sequences=config.engine.max_sequences,
        )


@contextmanager
def _rewards(config: RunConfig, data: PromptSet) -> Iterator[RewardPool]:
    with RewardPool(config.reward) as pool:
        pool.check(data.train[0].fields.keys())
        yield pool


def _add_engine(parts: Parts, model: Model, data: PromptSet, rewards: RewardPool, stack: ExitStack) -> None:
    """Give the run its engine, the publisher that fills it, and what generates with it."""
    config, world = parts.config, parts.world
    check_lengths(config, model, data)
    engine = model.engine(config, world)
    stack.callback(engine.close)
    parts.publisher = Publisher(engine, connect(parts.trainer, engine, config, world))
    phase = RolloutPhase(engine, rewards, model.tokenizer, config.rollout.timeout_s)
    stream = PromptStream(data.train, config.seed, config.data.shuffle)
    parts.source = LiveSource(config, world, stream, phase)
    parts.evaluator = Evaluator(config, world, data.heldout, phase)
    for reason, count in data.dropped.items():
        if count:
            parts.watch.progress.note(f"left out {count} rows: {reason.replace('_', ' ')}")


def connect(
    trainer: Trainer, engine: EmbeddedEngine, config: RunConfig, world: World
) -> AliasTransport | LocalTransport:
    """The transport between this trainer and this engine: shared tensors where it can be, else a local fill."""
    dtype = engine_dtype(config, world)
    check_complete(trainer.layout(), engine.layout())
    weights = trainer.weights()
    if can_alias(weights, dtype, world.device):
        engine.adopt(weights)
        return AliasTransport(weights, engine.weights())
    return LocalTransport(trainer.weights, engine.allocate(dtype))


def engine_dtype(config: RunConfig, world: World) -> torch.dtype:
    """The dtype of the engine's weights."""
    if config.engine.dtype == "auto":
        return torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return getattr(torch, config.engine.dtype)


def check_lengths(config: RunConfig, model: Model, data: PromptSet) -> None:
    longest = max(len(prompt.ids) for prompt in (*data.train, *data.heldout))
    if longest + config.rollout.max_new_tokens > model.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with rollout.max_new_tokens = {config.rollout.max_new_tokens} "
            f"that is more than the model's {model.max_length}; lower data.max_prompt_tokens or rollout.max_new_tokens"
        )


def _conclude(result: RunResult) -> None:
    """Write the report and say where everything is."""
    report = write_report(result.run_dir)
    if result.heldout_before is not None and result.heldout_after is not None:
        print(f"held-out score {result.heldout_before:.3f} -> {result.heldout_after:.3f} after {result.steps} steps")
    print(f"run directory  {result.run_dir}\nreport         {report}", file=sys.stdout, flush=True)


def rollout(config: RunConfig, out: Path | None) -> None:
    """Generate and score every prompt with the checkpoint as it is; one recorded rollout a line to `out` or stdout."""
    from stretto.orchestration.record import record

    with _world() as world, ExitStack() as stack:
        model = Model.load(config)
        data = load_prompts(config, model.tokenizer)
        rewards = stack.enter_context(_rewards(config, data))
        check_lengths(config, model, data)
        engine = model.engine(config, world)
        dtype = engine_dtype(config, world)
        weights: Any = models.load_model(model.directory, dtype)
        weights.to(world.device)
        engine.adopt({name: weights.get_parameter(name) for name in engine.layout()})
        engine.prepare(Version(1, 0))
        engine.commit(Version(1, 0))
        engine.resume()
        phase = RolloutPhase(engine, rewards, model.tokenizer, config.rollout.timeout_s)
        record(config, data.train, phase, out)
