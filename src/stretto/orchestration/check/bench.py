"""What the rungs of a check share: the probe, both sides as they come to life, and what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.config import RunConfig
from stretto.engines.embedded import EmbeddedEngine
from stretto.engines.server import ServerEngine
from stretto.orchestration.check.probe import Probe
from stretto.orchestration.check.reference import Reference
from stretto.orchestration.check.samples import Tokens
from stretto.orchestration.check.settings import CheckSettings
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import EngineSizes, checkpoint_layout, engine_layout, fsdp_layout, megatron_layout
from stretto.sync.publication import Publisher
from stretto.trainers import Trainer
from stretto.trainers.base import Streaming
from stretto.types import Rollout, Version
from stretto.world import World, local_part


@dataclass
class Bench:
    """One rank's. What has no value is made by the rung that needs it first; `stack` closes what was opened."""

    settings: CheckSettings
    probe: Probe
    world: World
    work: Path
    stack: ExitStack
    config: RunConfig
    hf_config: Any
    base_bytes: int
    """What the process had in memory before any weights."""
    atoms: Atoms = field(init=False)
    trainer: Trainer = field(init=False)
    engine: EmbeddedEngine | None = None
    server: ServerEngine | None = None
    """The engine, where it is one and was asked for."""
    publisher: Publisher | None = None
    reference: Reference | None = None
    late: str | None = None
    """Why the trainer could not be opened, when that is a matter of the plan."""
    noise: float = 0.0
    """How far transformers in the check's dtype is from transformers in float32."""
    published: int = 0
    seen_bytes: float = 0.0

    @property
    def generates(self) -> EmbeddedEngine | ServerEngine | None:
        """What samples can be drawn from."""
        return self.engine or self.server

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that both sides compute in."""
        return getattr(torch, self.settings.dtype)

    @property
    def exact(self) -> bool:
        """Whether that is float32, whose bounds are absolute."""
        return self.dtype == torch.float32

    @property
    def tokens(self) -> Tokens:
        """What samples may be made of."""
        text = self.hf_config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or 2**31
        return Tokens(text.vocab_size, longest, getattr(text, "pad_token_id", None))

    @property
    def sides(self) -> tuple[str, ...]:
        """The columns of the map that the trainer's tensors come from."""
        if self.settings.trainer == "fsdp":
            return ("memory",)
        return ("te",) if self.settings.megatron.te else ("megatron",)

    def files_layout(self, dtype: str = "float32") -> Layout:
        """The checkpoint's."""
        return checkpoint_layout(self.atoms, dtype)

    def trainer_layout(self) -> Layout:
        """What the trainer publishes, from the map and the sizes alone; of one that streams, its stream's."""
        if isinstance(getattr(self, "trainer", None), Streaming):
            return self.trainer.layout()
        if self.settings.trainer == "fsdp":
            return fsdp_layout(self.atoms, "float32", self.world.size)
        return megatron_layout(self.atoms, self.settings.dtype, self.settings.megatron)

    def local_layout(self) -> Layout | None:
        """Of the trainer's local tensors: its own, or the weight map's when it only streams; None when no map knows."""
        if not isinstance(self.trainer, Streaming):
            return self.trainer.layout()
        if self.atoms.weights.megatron is None:
            return None
        return megatron_layout(self.atoms, self.settings.dtype, self.settings.megatron)

    def engine_layout(self) -> Layout:
        """The engine's."""
        if self.generates is not None:
            return self.generates.layout()
        sizes = EngineSizes(self.settings.engine, tp=self.settings.engine_tp)
        return engine_layout(self.atoms, self.settings.dtype, sizes)

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """The trainer's log-probs of all `rollouts`, of which each rank scores its share; equal on every rank."""
        mine = rollouts[self.world.rank :: self.world.size]
        found: list[tuple[float, ...]] = [()] * len(rollouts)
        for rank, values in enumerate(self.world.gather(self.trainer.logprobs(mine))):
            found[rank :: self.world.size] = values
        return found

    def publish(self, step: Any = None) -> Any:
        """Bring the trainer's weights into the engine, after `step` when there is one; returns what `step` does."""
        self.published += 1
        if self.publisher is None:
            return step() if step else None
        self.publisher.open(Version(0, self.published))
        done = step() if step else None
        self.publisher.close()
        return done

    def copies(self) -> dict[str, Tensor]:
        """Copies of this rank's trainer tensors."""
        return {name: local_part(one.detach()).clone() for name, one in self.trainer.weights().items()}


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    """All numbers of a list of lists."""
    return [one for row in values for one in row]
