"""Handing a device's memory from the server to the trainer and back, as the turns of a run say."""

from __future__ import annotations

import torch

from stretto.engines import RolloutEngine
from stretto.engines.base import Memory
from stretto.orchestration.turns import Turns
from stretto.trainers import Trainer
from stretto.world import World


class Switch:
    """Begins with the server's memory given back. All ranks call every method together.

    Nothing is generated between `to_trainer` and `to_engine`.
    """

    def __init__(self, engine: RolloutEngine, turns: Turns, world: World):
        self._engine, self._turns, self._world = engine, turns, world
        parts: dict[str, tuple[Memory, ...]] = {"nothing": (), "kv": ("kv",), "all": ("kv", "weights")}
        self._parts = parts[turns.release]
        self._away = False
        self._release()

    def to_trainer(self, trainer: Trainer) -> None:
        """The server gives back what it has to, then the optimizer's state comes from host memory."""
        self._release()
        if self._turns.offload:
            trainer.onload()

    def to_publication(self, trainer: Trainer) -> None:
        """The optimizer's state goes to host memory, then the engine takes the memory of its weights."""
        if self._turns.offload:
            trainer.offload()
        if self._parts and self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._world.barrier("giving the device's memory to the engine")
        if "weights" in self._parts and self._away:
            self._engine.reclaim_memory("weights")

    def to_engine(self) -> None:
        """After the publication: the server takes its pool of keys and values, and serves."""
        if self._away:
            self._engine.reclaim_memory("kv")
            self._engine.resume()
            self._away = False

    def _release(self) -> None:
        if self._parts and not self._away:
            self._engine.pause()
            self._engine.release_memory(*self._parts)
            self._away = True
        self._world.barrier("giving the device's memory to the trainer")
