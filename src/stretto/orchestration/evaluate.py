"""Evaluation on the held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto.config.run import RunConfig
from stretto.orchestration.rollouts import EVAL, Job, RolloutPhase, Scored, Watch, sample_seed
from stretto.orchestration.selection import check_failures
from stretto.telemetry.metrics import mean_std
from stretto.types import FinishReason, Prompt, Sampling
from stretto.world import World

_SHOWN = 32
"""Prompts whose answers are kept at every evaluation, so that before and after can be compared."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics over all ranks, and this evaluation's shown samples (on every rank)."""

    metrics: dict[str, float]
    shown: list[Scored]


class Evaluator:
    """Answers the held-out prompts, the same ones with the same seeds every time."""

    def __init__(self, config: RunConfig, world: World, prompts: Sequence[Prompt], phase: RolloutPhase):
        self._config, self._world = config, world
        self._prompts, self._phase = prompts, phase

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def run(self, watch: Watch) -> Evaluation:
        """Generate and score. A sample that could not be scored is counted and left out, never taken for 0;
        RunError beyond reward.max_failed_share.
        """
        jobs = eval_jobs(self._config, self._prompts, range(self._world.rank, len(self._prompts), self._world.size))
        mine = self._phase.run(jobs, eval_sampling(self._config), watch, "eval")
        self._world.barrier("an evaluation")
        for text in check_failures(mine, self._config, self._world):
            watch.progress.note(f"held out, not scored: {text}")
        everyone = [one for part in self._world.gather(mine) for one in part]
        return evaluation_of(everyone)


def eval_sampling(config: RunConfig) -> Sampling:
    """How held-out prompts are answered."""
    return Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        stop=tuple(config.rollout.stop),
        stop_ids=tuple(config.rollout.stop_ids),
    )


def eval_jobs(config: RunConfig, prompts: Sequence[Prompt], places: Iterable[int]) -> list[Job]:
    """The held-out prompts at `places`, with their seeds."""
    samples = range(config.eval.samples)
    return [
        Job(at, prompts[at], tuple(sample_seed(config.seed, EVAL, at, index) for index in samples)) for at in places
    ]


def evaluation_of(scored: Sequence[Scored]) -> Evaluation:
    """What the answers to all held-out prompts come to."""
    everyone = sorted(scored, key=lambda one: (one.rollout.group_id, one.index))
    return Evaluation(_metrics(everyone), [one for one in everyone if one.rollout.group_id < _SHOWN])


def _metrics(scored: Sequence[Scored]) -> dict[str, float]:
    rewards = [one.rollout.reward for one in scored if one.rollout.reward is not None]
    lengths = [len(one.rollout.response_ids) for one in scored]
    metrics = {
        "eval/response_length_mean": sum(lengths) / len(lengths),
        "eval/truncated_share": sum(one.rollout.finish_reason is FinishReason.LENGTH for one in scored) / len(scored),
        "eval/failed_share": 1 - len(rewards) / len(scored),
    }
    return metrics | ({"eval/score": mean_std(rewards)[0]} if rewards else {})
