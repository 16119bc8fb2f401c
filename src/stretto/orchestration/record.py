"""`stretto rollout`: recorded rollouts, one JSON line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from stretto.config.run import RunConfig
from stretto.orchestration.rollouts import TRAIN, Job, RolloutPhase, Scored, Watch, sample_seed, train_sampling
from stretto.telemetry.metrics import PhaseTimer, mean_std
from stretto.telemetry.progress import Progress
from stretto.types import Prompt


def record(config: RunConfig, prompts: Sequence[Prompt], phase: RolloutPhase, out: Path | None) -> None:
    """Generate in batches of `rollout.prompts_per_step` and write as they come; a summary goes to stderr."""
    watch = Watch(PhaseTimer(), Progress())
    written: list[Scored] = []
    with open(out, "w") if out is not None else _Stdout() as file:
        for start in range(0, len(prompts), config.rollout.prompts_per_step):
            part = range(start, min(len(prompts), start + config.rollout.prompts_per_step))
            written += _batch(config, prompts, part, phase, watch, file)
    rewards = [one.rollout.reward for one in written if one.rollout.reward is not None]
    mean = f", mean reward {mean_std(rewards)[0]:.4f}" if rewards else ""
    failed = len(written) - len(rewards)
    print(f"{len(rewards)} rollouts of {len(prompts)} prompts{mean}, {failed} not scored", file=sys.stderr)


def _batch(
    config: RunConfig, prompts: Sequence[Prompt], part: range, phase: RolloutPhase, watch: Watch, file: TextIO
) -> list[Scored]:
    jobs = [
        Job(
            at,
            prompts[at],
            tuple(sample_seed(config.seed, TRAIN, at, index) for index in range(config.rollout.samples_per_prompt)),
        )
        for at in part
    ]
    scored = phase.run(jobs, train_sampling(config), watch, "rollout")
    for one in scored:
        if one.score.failure is None:
            print(one.rollout.to_json(), file=file, flush=True)
        else:
            print(f"not scored: row {one.rollout.source_row}: {one.score.failure.detail}", file=sys.stderr)
    return scored


class _Stdout:
    """Standard output as a context that does not close it."""

    def __enter__(self) -> TextIO:
        return sys.stdout

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
