"""How a trainer rank publishes into engines that are actors, from a snapshot, while it may train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from stretto.config import RunConfig
from stretto.engines import EngineError
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.engines import server_layout
from stretto.orchestration.model import Model
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import loader_layout, replica_layout
from stretto.sync.publication import Publisher
from stretto.sync.session import Destination, Options, Source
from stretto.sync.transports import EngineTransport
from stretto.trainers import Trainer
from stretto.types import Version
from stretto.world import World

_MIB = 2**20
_SWITCH_S = 60.0


class Outlet:
    """Every rank has one and calls the same methods in the same order; `world` is for its collectives alone.

    Each engine has a session of its own, so that one that dies leaves the others' publications whole.
    """

    def __init__(self, config: RunConfig, model: Model, world: World, trainer: Trainer):
        self._config, self._world, self._trainer = config, world, trainer
        self._held = trainer.layout()
        self._snapshot: dict[str, Tensor] = {}
        self._publishers: dict[str, Publisher] = {}
        dtype = engine_dtype(config, world)
        if config.engine.backend == "embedded":
            self._layout = replica_layout(atoms_of(model.directory, config.model.map), dtype_name(dtype), 1)
            self._loader = self._layout
        else:
            self._layout = server_layout(config, model, dtype, 1)
            self._loader = loader_layout(self._layout.atoms, dtype_name(dtype), self._layout.ranks)
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None

    def snapshot(self) -> None:
        """Copy the weights into tensors that are kept; no publication may be under way."""
        for name, tensor in self._trainer.weights().items():
            tensor = tensor.detach()
            if name in self._snapshot:
                self._snapshot[name].copy_(tensor)
            else:
                self._snapshot[name] = tensor.clone()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()

    def connect(self, name: str, replica: Any) -> None:
        """Make the session. Raises RuntimeError, on every rank, when the engine's ranks do not come."""
        engine = Remote(name, replica) if self._world.first else None
        source = Source(self._held, lambda: self._snapshot)
        destination = Destination(engine, self._layout.ranks, self._layout, self._loader)
        transport = EngineTransport(self._world, source, destination, self._options())
        self._publishers[name] = Publisher(Agreed(engine, self._world), transport)

    def disconnect(self, name: str) -> None:
        """End the session, if there is one."""
        publisher = self._publishers.pop(name, None)
        if publisher is not None:
            publisher.hang_up()

    def publish(self, version: Version, names: Sequence[str]) -> Mapping[str, int | str]:
        """Into one engine after the other; what went wrong with one is its result."""
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with stream:
            return {name: self._publish(version, self._publishers[name]) for name in names}

    def close(self) -> None:
        """End every session."""
        for name in list(self._publishers):
            self.disconnect(name)

    def _publish(self, version: Version, publisher: Publisher) -> int | str:
        try:
            publisher.open(version)
            return publisher.close()
        except RuntimeError as error:
            return str(error)

    def _options(self) -> Options:
        sync = self._config.sync
        across = self._world.device.type == "cuda" if sync.transport == "auto" else sync.transport == "collective"
        return Options(
            "collective" if across else "ipc", sync.write, sync.extra_mib * _MIB, sync.checksums, sync.timeout_s
        )


class Remote:
    """An engine that is an actor, as the first rank of the trainer speaks to it."""

    def __init__(self, name: str, replica: Any):
        self._name, self._replica = name, replica

    def enter(self, payload: str, timeout_s: float) -> None:
        """See :class:`~stretto.sync.receivers.Enterable`."""
        self._ask("enter", timeout_s, payload, timeout_s)

    def prepare(self, version: Version) -> None:
        """See the engine's contract."""
        self._ask("prepare", _SWITCH_S, version, _SWITCH_S)

    def commit(self, version: Version) -> None:
        """See the engine's contract."""
        self._ask("commit", _SWITCH_S, version)

    def cancel(self, version: Version) -> None:
        """See the engine's contract."""
        self._ask("cancel", _SWITCH_S, version)

    def fail(self, version: Version) -> None:
        """See the engine's contract."""
        self._ask("fail", _SWITCH_S, version)

    def _ask(self, method: str, timeout_s: float, *arguments: Any) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            ray.get(getattr(self._replica, method).remote(*arguments), timeout=timeout_s + 5.0)
        except RayTaskError as error:
            raise EngineError(f"{self._name}, {method}: {error.cause or error}") from None
        except RayError as error:
            raise EngineError(f"{self._name}, {method}: {type(error).__name__}: {error}") from None


class Agreed:
    """What the first rank does with an engine, with one outcome on every rank."""

    def __init__(self, engine: Remote | None, world: World):
        self._engine, self._world = engine, world

    def prepare(self, version: Version) -> None:
        """See the engine's contract."""
        self._together(lambda engine: engine.prepare(version))

    def commit(self, version: Version) -> None:
        """See the engine's contract."""
        self._together(lambda engine: engine.commit(version))

    def cancel(self, version: Version) -> None:
        """As much as it still can: the engine may be gone."""
        self._alone(lambda engine: engine.cancel(version))

    def fail(self, version: Version) -> None:
        """As much as it still can: the engine may be gone."""
        self._alone(lambda engine: engine.fail(version))

    def _together(self, act: Callable[[Remote], None]) -> None:
        problem = None
        if self._engine is not None:
            try:
                act(self._engine)
            except EngineError as error:
                problem = str(error)
        if problem := self._world.from_first(problem):
            raise EngineError(problem)

    def _alone(self, act: Callable[[Remote], None]) -> None:
        if self._engine is not None:
            with suppress(EngineError):
                act(self._engine)
