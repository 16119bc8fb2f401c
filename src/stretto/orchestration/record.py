"""`stretto rollout`: recorded rollouts, one JSON line each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from stretto.config.run import RunConfig
from stretto.orchestration.rollouts import TRAIN, Job, RolloutPhase, Scored, Watch, sample_seed, train_sampling
from stretto.telemetry.metrics import PhaseTimer, mean_std
from stretto.telemetry.progress import Progress
from stretto.types import Prompt


@contextmanager
def open_out(path: Path | None) -> Iterator[TextIO]:
    """A new file at `path` (None: standard output); when nothing was written by the time of a failure, it goes again.

    Raises ValueError when the file exists or cannot be made.
    """
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with _create(path) as file:
        try:
            yield file
        except BaseException:
            if not file.tell():
                path.unlink()
            raise


def _create(path: Path) -> TextIO:
    try:
        return open(path, "x")
    except FileExistsError:
        raise ValueError(f"{path} exists; remove it, or name another file with --out") from None
    except FileNotFoundError:
        raise ValueError(f"there is no directory {path.parent}; make it, or name another file with --out") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file with --out") from None


def record(config: RunConfig, prompts: Sequence[Prompt], phase: RolloutPhase, file: TextIO, tokenizer: str) -> None:
    """Generate in batches of `rollout.prompts_per_step` and write as they come; a summary goes to stderr.

    Every line says which `tokenizer` (its digest) its token ids belong to.
    """
    watch = Watch(PhaseTimer(), Progress())
    written: list[Scored] = []
    for start in range(0, len(prompts), config.rollout.prompts_per_step):
        part = range(start, min(len(prompts), start + config.rollout.prompts_per_step))
        for one in _batch(config, prompts, part, phase, watch):
            written.append(one)
            if one.score.failure is None:
                print(one.rollout.to_json(tokenizer=tokenizer), file=file, flush=True)
            else:
                print(f"not scored: row {one.rollout.source_row}: {one.score.failure.detail}", file=sys.stderr)
    rewards = [one.rollout.reward for one in written if one.rollout.reward is not None]
    mean = f", mean reward {mean_std(rewards)[0]:.4f}" if rewards else ""
    failed = len(written) - len(rewards)
    print(f"{len(rewards)} rollouts of {len(prompts)} prompts{mean}, {failed} not scored", file=sys.stderr)


def _batch(
    config: RunConfig, prompts: Sequence[Prompt], part: range, phase: RolloutPhase, watch: Watch
) -> list[Scored]:
    jobs = [
        Job(
            at,
            prompts[at],
            tuple(sample_seed(config.seed, TRAIN, at, index) for index in range(config.rollout.samples_per_prompt)),
        )
        for at in part
    ]
    return phase.run(jobs, train_sampling(config), watch, "rollout")
