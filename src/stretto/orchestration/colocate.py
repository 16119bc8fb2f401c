"""The colocated loop: generation and training take turns on the same devices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from stretto.config.run import RunConfig
from stretto.errors import RunError
from stretto.orchestration import measure
from stretto.orchestration.checkpoint import CheckpointStore, write_directory
from stretto.orchestration.evaluate import Evaluator
from stretto.orchestration.queue import InlineQueue, TokenCounts
from stretto.orchestration.result import RunResult
from stretto.orchestration.rollouts import Scored, Watch, sample_records
from stretto.orchestration.selection import check_failures, enqueue, take_batch
from stretto.orchestration.sources import SampleSource
from stretto.orchestration.switch import Switch
from stretto.orchestration.verification import Verification
from stretto.sync.publication import Publisher
from stretto.telemetry.runlog import RunLog
from stretto.trainers import StepReport, Trainer
from stretto.types import Batch, Rollout, Version
from stretto.world import World


@dataclass
class Progressed:
    """What a run has come to: saved in every checkpoint, beside the trainer's state."""

    step: int = 0
    incarnation: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    eval_first: float | None = None
    eval_last: float | None = None
    best_step: int | None = None
    best_score: float | None = None


@dataclass
class Parts:
    """Everything the loop turns. `publisher` is None when rollouts are replayed, `log` on every rank but the first.

    `switch` is None when trainer and engine take no turns with a device's memory; `expected_peak` are the bytes that
    the forecast gives a process, None when it has none.
    """

    config: RunConfig
    world: World
    trainer: Trainer
    source: SampleSource
    publisher: Publisher | None
    switch: Switch | None
    verification: Verification | None
    evaluator: Evaluator | None
    checkpoints: CheckpointStore
    tokenizer: Any
    log: RunLog | None
    watch: Watch
    run_dir: Path
    export_dtype: torch.dtype
    expected_peak: int | None


class ColocatedRun:
    """prompts -> engine -> rewards -> queue -> trainer -> publication, once a step."""

    def __init__(self, parts: Parts, progressed: Progressed):
        self._parts, self._config, self._world = parts, parts.config, parts.world
        self._so_far, self._first_step = progressed, progressed.step + 1
        self._queue = InlineQueue[Rollout](progressed.tokens)

    def run(self) -> RunResult:
        """Turn the loop to the last step. Raises RunError when the run has to stop."""
        with self._publication(self._so_far.step):
            pass  # the engine starts with the weights that the trainer starts with
        if self._so_far.step == 0:
            self._log(0, self._evaluate(0) | self._parts.watch.timer.metrics())
        for step in range(self._so_far.step, self._config.steps):
            metrics = self._step(step)
            self._so_far.step = step + 1
            if self._evaluation_due(step + 1):
                metrics |= self._evaluate(step + 1)
            self._finish_step(step + 1, metrics)
            if self._checkpoint_due(step + 1):
                self._save(step + 1)
        so_far = self._so_far
        return RunResult(
            self._parts.run_dir, so_far.step, so_far.eval_first, so_far.eval_last, so_far.best_step, so_far.best_score
        )

    def _step(self, step: int) -> dict[str, Any]:
        """One batch: generated, scored, trained on, published."""
        before, before_trained = self._queue.tokens.generated, self._queue.tokens.trained
        scored = self._parts.source.collect(step, self._parts.watch)
        self._world.barrier(f"the rollouts of step {step + 1}")
        self._report_failures(check_failures(scored, self._config, self._world))
        enqueue(self._queue, scored)
        batch, constant = take_batch(self._queue, self._config)
        if not self._world.sum([len(batch.rollouts)])[0]:
            raise RunError(f"step {step + 1} has no sample left to train on: {dict(self._queue.drain_reasons())}")
        with self._publication(step + 1) as moved:
            report = self._learn(batch)
        self._end(batch, report, step + 1)
        self._keep_samples(step + 1, "train", self._shown(scored))
        groups = len({rollout.group_id for rollout in batch.rollouts})
        return {
            **measure.sample_metrics([measure.facts_of(one) for one in scored], constant, groups, self._world),
            **report.metrics,
            **measure.token_metrics(self._queue, self._world),
            "train/skipped_steps": report.bad_updates,
            **self._moved(moved),
            **self._verify(step + 1),
            "sync/version": step + 1,
            **self._memory(step + 1),
            "tokens/step": self._world.sum([self._queue.tokens.generated - before])[0],
            "tokens/step_trained": self._world.sum([self._queue.tokens.trained - before_trained])[0],
        }

    def _memory(self, step: int) -> dict[str, float]:
        """The peak so far beside its forecast, said once in words."""
        peak, expected = measure.peak_memory(self._world), self._parts.expected_peak
        if expected is None:
            return {"memory/peak_bytes": peak}
        if step == self._first_step:
            gib = 2**30
            self._parts.watch.progress.note(f"memory: peak {peak / gib:.2f} GiB, forecast {expected / gib:.2f} GiB")
        return {"memory/peak_bytes": peak, "memory/forecast_bytes": expected}

    def _verify(self, number: int) -> dict[str, float]:
        """Whether the engine has what was published, when it is time to look."""
        verification = self._parts.verification
        if verification is None or not verification.due(number):
            return {}
        with self._parts.watch.timer("verify"):
            return verification.run(number)

    def _moved(self, moved: Sequence[int]) -> dict[str, float]:
        """Bytes of the step's publication over all ranks, and those of a full one where they may differ."""
        full = self._parts.publisher.full_bytes if self._parts.publisher else None
        total, whole = self._world.sum([sum(moved), full or 0])
        return {"sync/bytes": total} | ({} if full is None else {"sync/full_bytes": whole})

    def _shown(self, scored: Sequence[Scored]) -> list[Scored]:
        """The samples of a step that are kept: the first few, and every one on any rank that could not be scored."""
        failed = [one for part in self._world.gather([one for one in scored if one.score.failure]) for one in part]
        first = [one for one in scored[: self._config.telemetry.samples_per_step] if not one.score.failure]
        return first + failed

    def _learn(self, batch: Batch) -> StepReport:
        self._parts.watch.progress.phase("train", 1)
        with self._parts.watch.timer("train"):
            report = self._parts.trainer.step(batch)
        self._parts.watch.progress.advance()
        return report

    @contextmanager
    def _publication(self, number: int) -> Iterator[list[int]]:
        """The optimizer step happens inside, while no token is computed; then the version flips.

        Memory that trainer and engine take turns with is the trainer's inside.
        """
        moved: list[int] = []
        publisher = self._parts.publisher
        if publisher is None:
            yield moved
            return
        publisher.open(Version(self._so_far.incarnation, number))
        self._hand_over(lambda switch: switch.to_trainer(self._parts.trainer))
        yield moved
        self._hand_over(lambda switch: switch.to_publication(self._parts.trainer))
        with self._parts.watch.timer("sync"):
            moved.append(publisher.close())
        self._hand_over(Switch.to_engine)

    def _hand_over(self, turn: Callable[[Switch], None]) -> None:
        """Have the device's memory change hands, where it does."""
        if (switch := self._parts.switch) is not None:
            with self._parts.watch.timer("switch"):
                turn(switch)

    def _end(self, batch: Batch, report: StepReport, step: int) -> None:
        """End the reservations of the batch and write the ledger."""
        groups = sorted({(rollout.group_id, rollout.source_row) for rollout in batch.rollouts})
        trained = [(group_id, row) for group_id, row in groups if group_id not in report.skipped_groups]
        for group_id, _ in groups:
            if group_id in report.skipped_groups:
                self._queue.end_dropped(group_id, "bad_update")
            else:
                self._queue.end_trained(group_id)
        ended = self._world.gather((trained, self._queue.drain_reasons()))
        rows = [row for _, row in sorted(pair for pairs, _ in ended for pair in pairs)]
        if self._parts.log is not None:
            dropped = dict(sum((reasons for _, reasons in ended), Counter()))
            self._parts.log.ledger(step, {"trained": rows, "dropped": dropped})

    def _finish_step(self, step: int, metrics: dict[str, Any]) -> None:
        new, trained = metrics.pop("tokens/step"), metrics.pop("tokens/step_trained")
        times = self._parts.watch.timer.metrics()
        metrics |= times
        metrics |= measure.rate_metrics(times, new, trained)
        metrics["sync/seconds"] = times.get("time/sync", 0.0)
        self._log(step, metrics)
        self._parts.watch.progress.step(step, metrics)

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        if self._parts.log is not None:
            self._parts.log.log(step, metrics)

    def _report_failures(self, failures: Sequence[str]) -> None:
        for text in failures:
            self._parts.watch.progress.note(f"dropped {text}")

    def _keep_samples(self, step: int, kind: str, scored: Sequence[Scored]) -> None:
        if self._parts.log is None:
            return
        self._parts.log.samples(step, sample_records(kind, scored, self._parts.tokenizer))

    def _evaluation_due(self, step: int) -> bool:
        every = self._config.eval.every
        return bool(self._parts.evaluator) and (step == self._config.steps or bool(every and step % every == 0))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out prompts; a new best is exported to `best/`."""
        if not self._parts.evaluator:
            return {}
        evaluation = self._parts.evaluator.run(self._parts.watch)
        self._keep_samples(step, "eval", evaluation.shown)
        score = evaluation.metrics.get("eval/score")
        so_far = self._so_far
        so_far.eval_last = score
        if step == 0:
            so_far.eval_first = score
            self._parts.watch.progress.note(
                f"held-out score before training: {score if score is None else round(score, 4)}"
            )
        elif score is not None and (so_far.best_score is None or score > so_far.best_score):
            so_far.best_step, so_far.best_score = step, score
            with self._parts.watch.timer("checkpoint"):
                self._keep_best(step, score)
        return evaluation.metrics

    def _keep_best(self, step: int, score: float) -> None:
        def fill(directory: Path) -> None:
            self._export(directory)
            if self._world.first:  # inside, so that the weights can never be under another step's name
                (directory / "best.json").write_text(json.dumps({"step": step, "score": score}) + "\n")

        try:
            write_directory(self._parts.run_dir / "best", fill, self._world)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the best model so far could not be written: {error}; make room and resume") from error

    def _export(self, directory: Path) -> None:
        """A Hugging Face model of exactly the weights that the engine serves and that were evaluated."""
        self._parts.trainer.export(directory, self._parts.export_dtype)

    def _checkpoint_due(self, step: int) -> bool:
        every = self._config.checkpoint.every
        return step == self._config.steps or bool(every and step % every == 0)

    def _save(self, step: int) -> None:
        def write(directory: Path) -> None:
            for name, save in (("state", self._parts.trainer.save), ("hf", self._export)):
                if self._world.first:
                    (directory / name).mkdir()
                self._world.barrier()
                save(directory / name)

        totals = measure.token_metrics(self._queue, self._world)
        self._so_far.tokens = TokenCounts(*(int(totals[f"tokens/{k}"]) for k in ("generated", "trained", "dropped")))
        with self._parts.watch.timer("checkpoint"):
            self._parts.checkpoints.save(step, asdict(self._so_far), write)
