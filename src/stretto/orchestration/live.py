"""The generating half of a run: prompts, reward workers and the engine, and how they meet a trainer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.config import RunConfig
from stretto.data import PromptSet, PromptStream, load_prompts
from stretto.engines.embedded import EmbeddedEngine
from stretto.models import checkpoint as models
from stretto.orchestration.evaluate import Evaluator
from stretto.orchestration.model import Model
from stretto.orchestration.rollouts import RolloutPhase
from stretto.orchestration.sources import LiveSource
from stretto.rewards import RewardPool
from stretto.sync.files import CheckpointFiles, load
from stretto.sync.layouts import checkpoint_layout
from stretto.sync.plan import Plan
from stretto.sync.publication import Publisher
from stretto.sync.transports import AliasTransport, PlannedTransport, StreamTransport
from stretto.sync.transports.alias import can_alias
from stretto.trainers import Trainer
from stretto.trainers.base import Streaming
from stretto.world import World


@dataclass(frozen=True)
class Live:
    """Checked input: everything that can be wrong with data, rewards or lengths was found before a weight is loaded."""

    config: RunConfig
    world: World
    data: PromptSet
    engine: EmbeddedEngine
    phase: RolloutPhase

    @classmethod
    def open(cls, config: RunConfig, world: World, model: Model, stack: ExitStack) -> Live:
        """Read the prompts, start the reward workers and build the engine (without weights yet).

        `stack` closes what was opened. Raises ValueError for bad input.
        """
        data = load_prompts(config, model.tokenizer)
        check_lengths(config, model, data)
        rewards = stack.enter_context(RewardPool(config.reward))
        rewards.check(data.train[0].fields.keys())
        engine = EmbeddedEngine(
            model.directory,
            model.tokenizer,
            device=world.device,
            dtype=engine_dtype(config, world),
            eos_ids=models.end_of_sequence_ids(model.directory, model.tokenizer),
            max_length=model.max_length,
            max_sequences=config.engine.max_sequences,
            map_file=config.model.map,
            replicas=world.size,
        )
        stack.callback(engine.close)
        return cls(
            config, world, data, engine, RolloutPhase(engine, rewards, model.tokenizer, config.rollout.timeout_s)
        )

    def publisher(self, trainer: Trainer) -> Publisher:
        """What brings the trainer's weights into the engine."""
        return Publisher(self.engine, connect(trainer, self.engine, self.world, self.config.sync.extra_mib * 2**20))

    def source(self) -> LiveSource:
        """Samples for training."""
        stream = PromptStream(self.data.train, self.config.seed, self.config.data.shuffle)
        return LiveSource(self.config, self.world, stream, self.phase)

    def evaluator(self) -> Evaluator:
        """Evaluation on the held-out prompts."""
        return Evaluator(self.config, self.world, self.data.heldout, self.phase)


def connect(
    trainer: Trainer, engine: EmbeddedEngine, world: World, extra_bytes: int
) -> AliasTransport | PlannedTransport | StreamTransport:
    """The transport between this trainer and this engine: shared tensors where it can be, else what their plan says.

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
    return PlannedTransport(plan, world.rank, trainer.weights, engine.allocate(), world.device, extra_bytes)


def fill_from_files(engine: EmbeddedEngine, directory: Path) -> None:
    """Give the engine the weights of the checkpoint in `directory`, read through their plan."""
    layout = engine.layout()
    dtype = models.stored_dtype(directory)
    with CheckpointFiles(directory) as files:
        load(files, checkpoint_layout(layout.atoms, dtype), layout, 0, engine.allocate())


def engine_dtype(config: RunConfig, world: World) -> torch.dtype:
    """The dtype of the engine's weights."""
    if config.engine.dtype == "auto":
        return torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return getattr(torch, config.engine.dtype)


def check_lengths(config: RunConfig, model: Model, data: PromptSet) -> None:
    """Raise ValueError when the longest prompt and response together do not fit the model."""
    longest = max(len(prompt.ids) for prompt in (*data.train, *data.heldout))
    if longest + config.rollout.max_new_tokens > model.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with rollout.max_new_tokens = {config.rollout.max_new_tokens} "
            f"that is more than the model's {model.max_length}; lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
