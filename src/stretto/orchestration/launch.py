"""Putting the parts of a run together, inline: one process, or one SPMD group under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from stretto.config import RunConfig, load_config
from stretto.errors import RunError
from stretto.orchestration.checkpoint import CheckpointStore
from stretto.orchestration.colocate import ColocatedRun, Parts, Progressed
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.engines import serve_files
from stretto.orchestration.live import Live, Model
from stretto.orchestration.queue import TokenCounts
from stretto.orchestration.record import open_out, record
from stretto.orchestration.result import RunResult, conclude
from stretto.orchestration.rollouts import Watch
from stretto.orchestration.room import expected_peak
from stretto.orchestration.rundir import check_new, claim, create, next_incarnation, replayed
from stretto.orchestration.sources import ReplaySource
from stretto.orchestration.training import open_trainer
from stretto.sync.publication import Publisher
from stretto.telemetry.metrics import PhaseTimer
from stretto.telemetry.progress import Progress, open_progress
from stretto.telemetry.runlog import RunLog, rewind
from stretto.telemetry.sinks import check_sinks
from stretto.trainers import Trainer
from stretto.types import Version
from stretto.world import World, join_world, leave_world


def train(config: RunConfig, resume: Path | None = None, replay: Path | None = None) -> RunResult:
    """Run `config` in a new run directory; with `resume`, continue that one; with `replay`, train on recorded rollouts.

    Raises ValueError for bad input (before the first step), RunError when a started run has to stop.
    """
    if config.launch.backend == "ray":
        from stretto.orchestration.ray.launch import train_on_ray

        return train_on_ray(config, resume, replay)
    result = train_inline(config, resume, replay)
    if int(os.environ.get("RANK", 0)) == 0:
        conclude(result)
    return result


def train_inline(config: RunConfig, resume: Path | None, replay: Path | None) -> RunResult:
    """As `train`, in this process and, under torchrun or Ray, its likes; writes no report."""
    if resume is not None:
        return _go_on(config, resume)
    with _world(config) as world:
        check_new(config, world)
        check_sinks(config.telemetry)
        return _run(config, world, replay, lambda resolved: _new(resolved, world, replay), Progressed())


def resume(run_dir: Path) -> RunResult:
    """Continue the run in `run_dir` from its newest checkpoint, or from the start when it has none."""
    if not (run_dir / "config.toml").is_file():
        raise ValueError(f"{run_dir} is not a run directory: it has no config.toml")
    return train(load_config(run_dir / "config.toml"), resume=run_dir)


def _go_on(config: RunConfig, run_dir: Path) -> RunResult:
    with _world(config) as world, claim(run_dir, world):
        check_sinks(config.telemetry)
        store = CheckpointStore(run_dir, config.checkpoint.keep, world)
        step = world.from_first(store.latest())
        progressed = Progressed() if step is None else _restore(store, step, world)
        return _run(config, world, replayed(run_dir), lambda _: nullcontext(run_dir), progressed)


@contextmanager
def _new(config: RunConfig, world: World, replay: Path | None) -> Iterator[Path]:
    """A run directory made for `config` and held."""
    run_dir = create(config, world, replay)
    with claim(run_dir, world):
        yield run_dir


def _restore(store: CheckpointStore, step: int, world: World) -> Progressed:
    """A checkpoint's own state; the token totals go on at the first rank."""
    saved = store.read(step)
    try:
        saved["tokens"] = TokenCounts(**saved["tokens"]) if world.first else TokenCounts()
        return Progressed(**saved)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read the checkpoint {store.path(step)}: its run.json is not one of this version of stretto "
            f"({type(error).__name__}: {error})"
        ) from error


@contextmanager
def _world(config: RunConfig) -> Iterator[World]:
    world = join_world(config.rollout.timeout_s)
    try:
        yield world
    finally:
        leave_world()


def _run(
    config: RunConfig,
    world: World,
    replay: Path | None,
    directory: Callable[[RunConfig], AbstractContextManager[Path]],
    progressed: Progressed,
) -> RunResult:
    """Check all input, then enter the run directory, then turn the loop."""
    model = Model.load(config)
    with ExitStack() as stack:
        recorded = ReplaySource(config, world, replay, model) if replay is not None else None
        live = Live.open(config, world, model, stack) if recorded is None else None
        if recorded is not None:
            config = config.model_copy(update={"steps": recorded.steps})
        trainer = stack.enter_context(open_trainer(model.directory, config, world))
        run_dir = stack.enter_context(directory(config))
        progressed.incarnation = next_incarnation(run_dir, world)
        checkpoints = CheckpointStore(run_dir, config.checkpoint.keep, world)
        if progressed.step:
            trainer.load(checkpoints.path(progressed.step) / "state")
        log = stack.enter_context(_open_log(run_dir, config, progressed)) if world.first else None
        progress = stack.enter_context(open_progress(config.steps, enabled=world.first))
        publisher = _publisher(live, trainer, stack)
        parts = Parts(
            config=config,
            world=world,
            trainer=trainer,
            source=_source(recorded, live),
            publisher=publisher,
            switch=live.switch if live else None,
            verification=live.verification(trainer, publisher) if live and publisher else None,
            evaluator=live.evaluator() if live else None,
            checkpoints=checkpoints,
            tokenizer=model.tokenizer,
            log=log,
            watch=Watch(PhaseTimer(), progress),
            run_dir=run_dir,
            export_dtype=engine_dtype(config, world),
            expected_peak=expected_peak(live.room, world) if live and live.room else None,
        )
        _tell(live, recorded, progress)
        return _turn(parts, progressed)


def _source(recorded: ReplaySource | None, live: Live | None) -> Any:
    return recorded if live is None else live.source()


def _publisher(live: Live | None, trainer: Trainer, stack: ExitStack) -> Publisher | None:
    if live is None:
        return None
    publisher = live.publisher(trainer)
    stack.callback(publisher.hang_up)
    return publisher


def _open_log(run_dir: Path, config: RunConfig, progressed: Progressed) -> RunLog:
    """The run's files, without the lines that the checkpoint does not know of."""
    rewind(run_dir, progressed.step if progressed.step else -1)
    return RunLog(run_dir, config.telemetry)


def _turn(parts: Parts, progressed: Progressed) -> RunResult:
    """Run the loop. Input was checked before it, so a ValueError in it is a failure of the run, said by its rank."""
    try:
        return ColocatedRun(parts, progressed).run()
    except ValueError as error:
        raise RunError(f"{type(error).__name__}: {error} (STRETTO_DEBUG=1 shows where)") from error


def _tell(live: Live | None, recorded: ReplaySource | None, progress: Progress) -> None:
    """Notes before the first step: rows that were left out, or what a replay does not do."""
    for reason, count in live.data.dropped.items() if live else ():
        if count:
            progress.note(f"left out {count} rows: {reason.replace('_', ' ')}")
    if recorded is not None:
        progress.note(f"replays {recorded.steps} steps of recorded rollouts: no engine, no rewards, no evaluation")


def rollout(config: RunConfig, out: Path | None) -> None:
    """Generate and score every prompt with the checkpoint as it is; one recorded rollout a line to `out` or stdout.

    Raises ValueError for bad input, for an `out` that exists, and for more than one process.
    """
    with _world(config) as world, ExitStack() as stack:
        if world.size > 1:
            raise ValueError(f"stretto rollout runs in one process, not {world.size}; start it without torchrun")
        file = stack.enter_context(open_out(out))
        model = Model.load(config)
        live = Live.open(config, world, model, stack, trains=False)
        serve_files(live.engine, model.directory)
        version = Version(1, 0)
        live.engine.prepare(version)
        live.engine.commit(version)
        record(config, live.data.train, live.phase, file, model.tokenizer_digest)
