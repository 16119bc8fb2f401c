"""Opening the rollout engine that a run names, and joining it to a trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from stretto.config import RunConfig
from stretto.config.contradictions import filters_of, through_files
from stretto.config.sections import SyncConfig
from stretto.engines import EngineError, RolloutEngine
from stretto.engines.embedded import EmbeddedEngine
from stretto.engines.server import ServerEngine
from stretto.models import checkpoint as models
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.model import Model
from stretto.orchestration.turns import Turns
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.files import CheckpointFiles, load
from stretto.sync.layout import Layout
from stretto.sync.layouts import EngineSizes, checkpoint_layout, engine_layout, loader_layout
from stretto.sync.plan import Plan
from stretto.sync.publication import Transport
from stretto.sync.session import Destination, Options, Source
from stretto.sync.transports import (
    AliasTransport,
    DiskTransport,
    EngineTransport,
    HttpTransport,
    PlannedTransport,
    StreamTransport,
)
from stretto.sync.transports.alias import can_alias
from stretto.sync.transports.files import FileOptions
from stretto.trainers import Trainer
from stretto.trainers.base import Streaming
from stretto.world import World

_MIB = 2**20


def open_engine(
    config: RunConfig, world: World, model: Model, stack: ExitStack, turns: Turns | None = None
) -> RolloutEngine:
    """The engine that this rank generates with, without the trainer's weights yet; `stack` closes it.

    With `turns` a server shares the memory of the trainer's device.

    Raises ValueError for what the configuration or the model has wrong, EngineError when a server is not ready in time.
    """
    eos = models.end_of_sequence_ids(model.directory, model.tokenizer)
    if config.engine.backend == "embedded":
        engine = EmbeddedEngine(
            model.directory,
            model.tokenizer,
            device=world.device,
            dtype=engine_dtype(config, world),
            eos_ids=eos,
            max_length=model.max_length,
            max_sequences=config.engine.max_sequences,
            map_file=config.model.map,
            replicas=world.size,
        )
        stack.callback(engine.close)
        return engine
    return _open_server(config, world, model, eos, stack, turns)


def _open_server(
    config: RunConfig, world: World, model: Model, eos: Sequence[int], stack: ExitStack, turns: Turns | None
) -> ServerEngine:
    """One server for `engine.tp` processes: the first of them starts it and speaks for it, the others only ask it."""
    settings = config.engine
    if world.size % settings.tp:
        raise ValueError(
            f"engine.tp = {settings.tp} does not divide the {world.size} processes of the run; "
            f"start a multiple of {settings.tp}"
        )
    layout = server_layout(config, model, engine_dtype(config, world), world.size // settings.tp)
    leads = world.rank % settings.tp == 0

    def start(url: str | None) -> ServerEngine:
        return open_server(config, model, eos, stack, layout, world, url=url, leads=leads, turns=turns)

    engine, error = None, None
    try:
        engine = start(settings.url) if leads else None
    except (EngineError, ValueError) as failure:
        error = failure
    said = world.gather((engine.base_url if engine else None, None if error is None else str(error)))
    if error is not None:
        raise error
    if others := [text for _, text in said if text]:
        raise EngineError(others[0])
    return engine or start(said[world.rank - world.rank % settings.tp][0])


def server_layout(config: RunConfig, model: Model, dtype: torch.dtype, replicas: int) -> Layout:
    """What the ranks of so many servers of this run hold."""
    sizes = EngineSizes(config.engine.backend, tp=config.engine.tp, replicas=replicas)
    return engine_layout(atoms_of(model.directory, config.model.map), dtype_name(dtype), sizes)


def open_server(
    config: RunConfig,
    model: Model,
    eos: Sequence[int],
    stack: ExitStack,
    layout: Layout,
    world: World,
    *,
    url: str | None,
    leads: bool = True,
    turns: Turns | None = None,
) -> ServerEngine:
    """Start a server beside this process, or adopt the one at `url`; `stack` closes it.

    Raises ValueError for what its options have wrong, EngineError when it is not ready in time.
    """
    settings = config.engine
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-engine-")))
    engine = _server_class(settings.backend)(
        model.directory,
        model.tokenizer,
        dtype=engine_dtype(config, world),
        eos_ids=eos,
        max_length=model.max_length,
        max_sequences=settings.max_sequences,
        tp=settings.tp,
        layout=layout,
        options={} if url else getattr(settings, settings.backend),
        python=settings.python,
        url=url,
        device=world.device,
        start_timeout_s=settings.start_timeout_s,
        log=folder / "server.log",
        filters=bool(filters_of(config)),
        leads=leads,
        releases=turns is not None and turns.release != "nothing",
        memory_share=turns.share if turns is not None and url is None else None,
    )
    stack.callback(engine.close)
    return engine


def _server_class(backend: str) -> Callable[..., ServerEngine]:
    if backend == "sglang":
        from stretto.engines.sglang import SglangEngine

        return SglangEngine
    from stretto.engines.vllm import VllmEngine

    return VllmEngine


def connect(trainer: Trainer, engine: RolloutEngine, config: RunConfig, world: World) -> Transport:
    """The transport between this trainer and this engine. All ranks call together.

    Raises ValueError when the trainer's weights do not fill the engine's, RuntimeError when a server's ranks do not
    come.
    """
    if isinstance(engine, EmbeddedEngine):
        return connect_embedded(trainer, engine, world, config.sync.extra_mib * _MIB, checksums=config.sync.checksums)
    assert isinstance(engine, ServerEngine)
    direct = engine.layout()
    dtype = dtype_name(engine_dtype(config, world))
    loader = loader_layout(direct.atoms, dtype, direct.ranks)
    destination = Destination(engine if engine.leads else None, config.engine.tp, direct, loader)
    source = Source(trainer.layout(), trainer.weights, trainer.stream if isinstance(trainer, Streaming) else None)
    if through_files(config):
        engine.set_layout(loader)
        return _through_files(config.sync, world, source, destination, checkpoint_layout(direct.atoms, dtype))
    transport = EngineTransport(world, source, destination, _options(config.sync))
    engine.set_layout(loader if transport.refused else direct)
    return transport


def _through_files(
    sync: SyncConfig, world: World, source: Source, destination: Destination, target: Layout
) -> DiskTransport | HttpTransport:
    options = FileOptions(target, sync.delta, sync.extra_mib * _MIB, sync.timeout_s)
    if sync.transport == "http":
        return HttpTransport(world, source, destination, options, sync.receivers)
    assert sync.directory is not None
    return DiskTransport(world, source, destination, options, Path(sync.directory))


def connect_embedded(
    trainer: Trainer, engine: EmbeddedEngine, world: World, extra_bytes: int, *, checksums: bool = False
) -> AliasTransport | PlannedTransport | StreamTransport:
    """Shared tensors where it can be, else what the plan says.

    A trainer that only streams its weights fills the engine of each rank as they come by.

    Raises ValueError when the trainer's weights do not fill the engine's.
    """
    source, target = trainer.layout(), engine.layout()
    if isinstance(trainer, Streaming):
        return StreamTransport(source, target, world.rank, trainer.stream, engine.allocate())
    plan = Plan.of(source, target, range(world.size))
    weights = trainer.weights()
    if can_alias(source, target, weights):
        engine.adopt(weights)
        return AliasTransport(weights, engine.weights())
    return PlannedTransport(
        plan, world.rank, trainer.weights, engine.allocate(), world.device, extra_bytes, checksums=checksums
    )


def _options(sync: SyncConfig) -> Options:
    transport = "collective" if sync.transport == "collective" else "ipc"
    return Options(transport, sync.write, sync.extra_mib * _MIB, sync.checksums, sync.timeout_s)


def serve_files(engine: RolloutEngine, directory: Path) -> None:
    """Have the engine serve the checkpoint in `directory`; a server has read it by itself."""
    if isinstance(engine, EmbeddedEngine):
        layout, dtype = engine.layout(), models.stored_dtype(directory)
        with CheckpointFiles(directory) as files:
            load(files, checkpoint_layout(layout.atoms, dtype), layout, 0, engine.allocate())
