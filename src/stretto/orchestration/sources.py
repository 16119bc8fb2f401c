"""Where a step's samples come from: the rollout engine, or a file of recorded rollouts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

from stretto.config.run import RunConfig
from stretto.data import PromptStream
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

    Raises ValueError for a file that cannot be trained on by a model of `vocabulary` token ids.
    """

    def __init__(self, config: RunConfig, world: World, path: Path, vocabulary: int):
        self._config, self._world = config, world
        self._groups = list(read_groups(path, vocabulary).values())
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


def read_groups(path: Path, vocabulary: int) -> dict[int, list[Rollout]]:
    """Recorded rollouts by group id, checked to be of a model of `vocabulary` token ids.

    Raises ValueError naming the file and line that is wrong.
    """
    groups: dict[int, list[Rollout]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read the recorded rollouts {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            rollout = Rollout.from_json(line)
            _check(rollout, vocabulary)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        groups.setdefault(rollout.group_id, []).append(rollout)
    return groups


def _check(rollout: Rollout, vocabulary: int) -> None:
    if rollout.reward is None:
        raise ValueError("the rollout has no reward; record with stretto rollout --reward")
    for name, values in (("reward", (rollout.reward,)), ("log-prob", rollout.logprobs_T)):
        for value in values:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"the {name} is {value!r}, not a finite number")
    for token in (*rollout.prompt_ids, *rollout.response_ids):
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(
                f"token id {token!r} is outside the model's vocabulary of {vocabulary}: record with this model"
            )
