"""Generating and scoring: requests go to the engine, finished groups to the reward workers while others still grow."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from stretto.config.run import RunConfig
from stretto.engines import EngineError, RolloutEngine
from stretto.errors import RunError
from stretto.rewards import PendingScores, RewardPool, Sample
from stretto.telemetry.metrics import PhaseTimer
from stretto.telemetry.progress import Progress
from stretto.types import Completion, Failure, FinishReason, Prompt, Request, Rollout, Sampling, Score

TRAIN, EVAL = 0, 1


class Watch(NamedTuple):
    """Who is told how a phase goes."""

    timer: PhaseTimer
    progress: Progress


@dataclass(frozen=True)
class Scored:
    """Sample `index` of its group with what its rewards said; `rollout` has the reward unless `score` is a failure."""

    index: int
    rollout: Rollout
    score: Score


@dataclass(frozen=True)
class Job:
    """A group to generate: `id` is unique in the phase."""

    id: int
    prompt: Prompt
    seeds: tuple[int, ...]


def sample_seed(run_seed: int, purpose: int, position: int, index: int) -> int:
    """A sample's seed: a function of the run's seed, TRAIN or EVAL, the prompt's position and the sample's index."""
    packed = struct.pack("<qqqq", run_seed, purpose, position, index)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def train_sampling(config: RunConfig) -> Sampling:
    """How training samples are drawn."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_ids=tuple(rollout.stop_ids),
    )


class RolloutPhase:
    """Runs jobs through the engine and the reward workers."""

    def __init__(self, engine: RolloutEngine, rewards: RewardPool, tokenizer: Any, timeout_s: float):
        self._engine, self._rewards, self._tokenizer = engine, rewards, tokenizer
        self._timeout_s = timeout_s

    def run(self, jobs: Sequence[Job], sampling: Sampling, watch: Watch, phase: str) -> list[Scored]:
        """Every sample of every job, grouped in the jobs' order; time is booked as `phase` and `reward`.

        Raises RunError when the phase outlasts its deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        watch.progress.phase(phase, sum(len(job.seeds) for job in jobs))
        with watch.timer(phase):
            finished, pending = self._generate(jobs, sampling, watch.progress)
        with watch.timer("reward"):
            scores = {key: self._wait(value, deadline) for key, value in pending.items()}
        return [
            _scored(job, completion, score, sampling)
            for job in jobs
            for completion, score in zip(finished[job.id], scores[job.id], strict=True)
        ]

    def _generate(
        self, jobs: Sequence[Job], sampling: Sampling, progress: Progress
    ) -> tuple[dict[int, list[Completion]], dict[int, PendingScores]]:
        """All completions by job, and their scores on the way."""
        requests = [Request(job.id, job.prompt.ids, job.seeds, sampling) for job in jobs]
        by_id = {job.id: job for job in jobs}
        finished: dict[int, list[Completion]] = {job.id: [] for job in jobs}
        pending: dict[int, PendingScores] = {}
        try:
            for completion in self._engine.generate(requests, deadline_s=self._timeout_s):
                job, group = by_id[completion.request_id], finished[completion.request_id]
                group.append(completion)
                progress.advance()
                if len(group) == len(job.seeds):
                    group.sort(key=lambda one: one.index)
                    pending[job.id] = self._submit(job, group)
        except EngineError as error:
            raise RunError(str(error)) from error
        return finished, pending

    def _submit(self, job: Job, group: Sequence[Completion]) -> PendingScores:
        responses = [completion.response_ids for completion in group]
        return self._rewards.submit(reward_samples(job.prompt, responses, self._tokenizer))

    def _wait(self, pending: PendingScores, deadline: float) -> list[Score]:
        try:
            return pending.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise RunError(f"{error}: the rollout phase outlasted rollout.timeout_s = {self._timeout_s:g}") from error


def _scored(job: Job, completion: Completion, score: Score, sampling: Sampling) -> Scored:
    temperature = sampling.temperature or 1.0
    rollout = Rollout.of(
        completion, job.prompt.ids, temperature=temperature, group_id=job.id, source_row=job.prompt.row
    )
    return Scored(completion.index, rollout.scored(score) if score.failure is None else rollout, score)


def reward_samples(prompt: Prompt, responses: Sequence[tuple[int, ...]], tokenizer: Any) -> list[Sample]:
    """What the rewards are given of a prompt's responses (token ids)."""
    return [
        Sample(
            prompt=prompt.text,
            completion=tokenizer.decode(response_ids, skip_special_tokens=True),
            completion_ids=response_ids,
            fields=prompt.fields,
            messages=prompt.messages,
        )
        for response_ids in responses
    ]


def why_dropped(reason: FinishReason, score: Score) -> str | None:
    """The reason why a sample that ended so cannot be trained on, or None."""
    if reason is FinishReason.ABORT:
        return "aborted"
    return f"reward_{score.failure.kind}" if score.failure else None


def failure_told(row: int, index: int, failure: Failure) -> str:
    """A sample that could not be scored, in words."""
    return f"row {row}, sample {index}: reward {failure.reward} {failure.kind}: {failure.detail}"


def sample_records(kind: str, scored: Sequence[Scored], tokenizer: Any) -> list[dict[str, Any]]:
    """The samples as samples.jsonl has them; `kind` is "train" or "eval"."""
    return [
        {
            "kind": kind,
            "row": one.rollout.source_row,
            "prompt": tokenizer.decode(one.rollout.prompt_ids),
            "response": tokenizer.decode(one.rollout.response_ids),
            "reward": one.rollout.reward,
            "failure": asdict(one.score.failure) if one.score.failure else None,
            "finish_reason": str(one.rollout.finish_reason),
        }
        for one in scored
    ]
