"""The generating half of a run: prompts, reward workers and the engine, and how they meet a trainer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from stretto.config import RunConfig
from stretto.data import PromptSet, PromptStream, load_prompts
from stretto.engines import RolloutEngine
from stretto.orchestration.engines import connect, open_engine
from stretto.orchestration.evaluate import Evaluator
from stretto.orchestration.model import Model
from stretto.orchestration.rollouts import RolloutPhase
from stretto.orchestration.room import Room, free_bytes, room_for, sizes_of
from stretto.orchestration.sources import LiveSource
from stretto.orchestration.switch import Switch
from stretto.orchestration.verification import Verification
from stretto.rewards import RewardPool
from stretto.sync.publication import Publisher
from stretto.trainers import Trainer
from stretto.world import World


@dataclass(frozen=True)
class Live:
    """Checked input: everything that can be wrong with data, rewards or lengths was found before a weight is loaded."""

    config: RunConfig
    world: World
    data: PromptSet
    room: Room | None
    engine: RolloutEngine
    switch: Switch | None
    phase: RolloutPhase

    @classmethod
    def open(cls, config: RunConfig, world: World, model: Model, stack: ExitStack, *, trains: bool = True) -> Live:
        """Read the prompts, start the reward workers and the engine (without the trainer's weights yet).

        Where nothing `trains`, the engine has the device for itself.
        `stack` closes what was opened. Raises ValueError for bad input, and for a run that does not fit the memory.
        """
        data = load_prompts(config, model.tokenizer)
        check_lengths(config, model, data)
        rewards = stack.enter_context(RewardPool(config.reward))
        rewards.check(data.train[0].fields.keys())
        room = _room(config, world, model, data) if trains else None
        turns = room.turns if room else None
        engine = open_engine(config, world, model, stack, turns)
        switch = Switch(engine, turns, world) if turns else None
        phase = RolloutPhase(engine, rewards, model.tokenizer, config.rollout.timeout_s)
        return cls(config, world, data, room, engine, switch, phase)

    def publisher(self, trainer: Trainer) -> Publisher:
        """What brings the trainer's weights into the engine."""
        return Publisher(self.engine, connect(trainer, self.engine, self.config, self.world))

    def verification(self, trainer: Trainer, publisher: Publisher) -> Verification:
        """What looks whether the engine has the trainer's weights."""
        return Verification(self.config, self.world, self.data.train[0], self.engine, trainer, publisher)

    def source(self) -> LiveSource:
        """Samples for training."""
        stream = PromptStream(self.data.train, self.config.seed, self.config.data.shuffle)
        return LiveSource(self.config, self.world, stream, self.phase)

    def evaluator(self) -> Evaluator:
        """Evaluation on the held-out prompts."""
        return Evaluator(self.config, self.world, self.data.heldout, self.phase)


def _room(config: RunConfig, world: World, model: Model, data: PromptSet) -> Room:
    """The same on every rank: that with the least memory decides. ValueError when the run does not fit."""
    left = [one for one in world.gather(free_bytes(world)) if one is not None]
    room = room_for(config, model.directory, world, sizes_of(config, data), min(left, default=None))
    if room.refusal is not None and config.memory.refuse:
        raise ValueError(f"{room.refusal} (`stretto train --dry-run` shows the forecast)")
    return room


def check_lengths(config: RunConfig, model: Model, data: PromptSet) -> None:
    """Raise ValueError when the longest prompt and response together do not fit the model."""
    longest = max(len(prompt.ids) for prompt in (*data.train, *data.heldout))
    if longest + config.rollout.max_new_tokens > model.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with rollout.max_new_tokens = {config.rollout.max_new_tokens} "
            f"that is more than the model's {model.max_length}; lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
