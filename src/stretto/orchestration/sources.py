"""Where a step's samples come from: the rollout engine, or a file of recorded rollouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Protocol

from stretto.config.run import RunConfig
from stretto.data import PromptStream
from stretto.orchestration.model import Model
from stretto.orchestration.rollouts import TRAIN, Job, RolloutPhase, Scored, Watch, sample_seed, train_sampling
from stretto.types import Rollout, Score
from stretto.world import World


class SampleSource(Protocol):
    """Gives this rank's share of the samples of step `step` (from 0)."""

    def collect(self, step: int, watch: Watch) -> list[Scored]: ...


def share(config: RunConfig, step: int, world: World) -> range:
    """Positions in the prompt stream that this rank takes at `step`; their union does not depend on the ranks."""
    first = step * config.rollout.prompts_per_step
    return range(first + world.rank, first + config.rollout.prompts_per_step, world.size)


class LiveSource:
    """Generates with the engine."""

    def __init__(self, config: RunConfig, world: World, prompts: PromptStream, phase: RolloutPhase):
        self._config, self._world = config, world
        self._prompts, self._phase = prompts, phase

    def collect(self, step: int, watch: Watch) -> list[Scored]:
        """See SampleSource."""
        samples = range(self._config.rollout.samples_per_prompt)
        jobs = [
            Job(at, self._prompts.at(at), tuple(sample_seed(self._config.seed, TRAIN, at, i) for i in samples))
            for at in share(self._config, step, self._world)
        ]
        return self._phase.run(jobs, train_sampling(self._config), watch, "rollout")


class ReplaySource:
    """Reads recorded rollouts; groups come in the file's order, one after the other.

    Raises ValueError for a file that cannot be trained on by `model`.
    """

    def __init__(self, config: RunConfig, world: World, path: Path, model: Model):
        self._config, self._world = config, world
        self._groups = list(read_groups(path, model).values())
        self.steps = min(config.steps, len(self._groups) // config.rollout.prompts_per_step)
        if not self.steps:
            raise ValueError(
                f"{path} holds {len(self._groups)} groups of recorded rollouts, fewer than rollout.prompts_per_step = "
                f"{config.rollout.prompts_per_step}; lower that or record more"
            )

    def collect(self, step: int, watch: Watch) -> list[Scored]:
        """See SampleSource."""
        return [
            Scored(index, rollout, Score(rollout.reward, rollout.reward_parts))
            for at in share(self._config, step, self._world)
            for index, rollout in enumerate(self._groups[at])
        ]


def read_groups(path: Path, model: Model) -> dict[int, list[Rollout]]:
    """Recorded rollouts by group id, checked to be what `model` can train on.

    Raises ValueError naming the file and line that is wrong.
    """
    groups: dict[int, list[Rollout]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read the recorded rollouts {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            raw = json.loads(line)
            rollout = Rollout.from_dict(raw)
            _check(rollout, model)
            if raw.get("tokenizer", model.tokenizer_digest) != model.tokenizer_digest:
                raise ValueError(
                    "recorded with another tokenizer, whose token ids mean other text: record with this model"
                )
            group = groups.setdefault(rollout.group_id, [])
            if group and group[0].prompt_ids != rollout.prompt_ids:
                raise ValueError(f"group {rollout.group_id} has two prompts: were two recordings put into one file?")
        except (ValueError, AttributeError) as error:  # AttributeError: a line that is no table
            raise ValueError(f"{path}, line {number}: {error}") from error
        group.append(rollout)
    return groups


def _check(rollout: Rollout, model: Model) -> None:
    if rollout.reward is None:
        raise ValueError("the rollout has no reward; record with stretto rollout --reward")
    if not rollout.prompt_ids or not rollout.response_ids:
        raise ValueError("a rollout needs a prompt and a response of at least one token each")
    if len(rollout.prompt_ids) + len(rollout.response_ids) > model.max_length:
        raise ValueError(f"prompt and response are longer than the model's {model.max_length} tokens")
    if any(keep not in (0, 1) for keep in rollout.loss_mask_T):
        raise ValueError("loss_mask_T has values other than 0 and 1")
    if not isinstance(rollout.temperature, int | float) or not 0 < rollout.temperature < math.inf:
        raise ValueError(f"the temperature is {rollout.temperature!r}, not a number above 0")
    for name, values in (("reward", (rollout.reward,)), ("log-prob", rollout.logprobs_T)):
        for value in values:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"the {name} is {value!r}, not a finite number")
    for token in (*rollout.prompt_ids, *rollout.response_ids):
        if not isinstance(token, int) or not 0 <= token < model.vocabulary:
            raise ValueError(
                f"token id {token!r} is outside the model's vocabulary of {model.vocabulary}: record with this model"
            )
