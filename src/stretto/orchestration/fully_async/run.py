"""The fully asynchronous loop: groups grow all the time, and the trainer takes the oldest that are complete."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.algorithms.advantages import group_advantages
from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration import measure
from stretto.orchestration.checkpoint import CheckpointStore, write_directory
from stretto.orchestration.evaluate import eval_jobs, eval_sampling, evaluation_of
from stretto.orchestration.fully_async.growing import Feeder, Grower, Grown
from stretto.orchestration.fully_async.progressed import Progressed, progressed_at
from stretto.orchestration.fully_async.publishing import Herald
from stretto.orchestration.fully_async.scoring import RewardWorkers
from stretto.orchestration.fully_async.staleness import lag
from stretto.orchestration.fully_async.trainers import TrainerGroup, TrainerLost
from stretto.orchestration.queue import InlineQueue
from stretto.orchestration.ray.bus import SampleBus
from stretto.orchestration.ray.trainer_rank import Share
from stretto.orchestration.result import RunResult
from stretto.orchestration.rollouts import Scored, Watch, sample_records
from stretto.orchestration.rundir import next_incarnation
from stretto.orchestration.selection import check_failed_share
from stretto.telemetry.runlog import RunLog
from stretto.trainers import StepReport
from stretto.types import Prompt, Version
from stretto.world import World

_ROLL_BACKS = 3
"""Times that the trainer begins anew from one checkpoint before the run stops."""
_HELD_OUT = 10**11
"""Added to the number of a held-out prompt: group ids of training begin at 0."""


@dataclass(frozen=True)
class Parts:
    """Everything the loop turns."""

    config: RunConfig
    trainers: TrainerGroup
    herald: Herald
    rewards: RewardWorkers
    grower: Grower
    feeder: Feeder
    queue: InlineQueue[Grown]
    bus: SampleBus
    heldout: Sequence[Prompt]
    checkpoints: CheckpointStore
    tokenizer: Any
    log: RunLog
    watch: Watch
    run_dir: Path
    world: World


class FullyAsyncRun:
    """Takes a batch, trains on it, and has the new weights published while the next one is trained."""

    def __init__(self, parts: Parts, progressed: Progressed):
        self._parts, self._config, self._so_far = parts, parts.config, progressed
        self._rolled_back_to: int | None = -1
        self._in_vain = 0

    async def run(self) -> RunResult:
        """Turn the loop to the last step. Raises RunError when the run has to stop."""
        so_far, parts = self._so_far, self._parts
        parts.feeder.restart(so_far.next, so_far.again, so_far.step)
        await parts.herald.start(Version(so_far.incarnation, so_far.step))
        while True:
            try:
                await self._turn()
                break
            except TrainerLost as error:
                await self._roll_back(error)
        so_far = self._so_far
        return RunResult(
            parts.run_dir, so_far.step, so_far.eval_first, so_far.eval_last, so_far.best_step, so_far.best_score
        )

    async def _turn(self) -> None:
        """To the last step, or to an error."""
        parts = self._parts
        background = [asyncio.create_task(parts.feeder.run()), asyncio.create_task(parts.herald.watch())]
        try:
            await self._until_one_fails(self._steps(), background)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await parts.herald.close()

    async def _roll_back(self, error: TrainerLost) -> None:
        """Begin the trainer anew from the newest checkpoint, in a new incarnation; the engines go on."""
        parts, step = self._parts, self._parts.checkpoints.latest()
        if step == self._rolled_back_to:
            self._in_vain += 1
        else:
            self._rolled_back_to, self._in_vain = step, 1
        if self._in_vain > _ROLL_BACKS:
            raise RunError(f"the trainer failed {self._in_vain} times without coming to another checkpoint: {error}")
        parts.watch.progress.note(f"{error}; the trainer begins anew from step {step or 0}")
        so_far, tokens = progressed_at(parts.checkpoints, step), parts.queue.tokens
        so_far.incarnation = next_incarnation(parts.run_dir, parts.world)
        so_far.restarts, so_far.tokens = self._so_far.restarts + 1, tokens
        await parts.trainers.open(parts.checkpoints.path(step) / "state" if step else None)
        await parts.herald.restart(Version(so_far.incarnation, so_far.step))
        parts.queue.roll_back(so_far.trained)
        await asyncio.to_thread(lambda: parts.bus.clear(sorted(parts.bus.keys())))
        parts.feeder.restart(so_far.next, so_far.again, so_far.step)
        parts.log.rewind(so_far.step if so_far.step else -1)
        self._so_far = so_far

    async def _until_one_fails(self, work: Any, background: Sequence[asyncio.Task[None]]) -> None:
        """Do the work; what goes on beside it never ends but with an error, which ends the work."""
        main = asyncio.create_task(work)
        await asyncio.wait([main, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                main.cancel()
                await asyncio.gather(main, return_exceptions=True)
                task.result()
        await main

    async def _steps(self) -> None:
        if self._so_far.step == 0:
            metrics = await self._evaluate(0)
            self._parts.log.log(0, metrics | self._parts.watch.timer.metrics())
        for step in range(self._so_far.step + 1, self._config.steps + 1):
            metrics = await self._step(step)
            self._so_far.step = step
            if self._evaluation_due(step):
                metrics |= await self._evaluate(step)
            self._finish(step, metrics)
            if self._checkpoint_due(step):
                await self._save(step)
        await self._parts.herald.settled()

    async def _step(self, step: int) -> dict[str, Any]:
        parts, timer = self._parts, self._parts.watch.timer
        before = parts.queue.tokens.generated, parts.queue.tokens.trained
        parts.watch.progress.phase("rollout", self._config.rollout.prompts_per_step)
        with timer("rollout"):
            groups = await self._batch(step)
        grown = [one for group in groups for one in group]
        await self._keep_samples(step, grown)
        shares, constant = self._shares(groups)
        parts.watch.progress.phase("train", 1)
        with timer("train"):
            reports = await parts.trainers.step(shares)
        with timer("sync_blocked"):  # the snapshot of the step before may still be on its way
            await parts.herald.settled()
            await parts.trainers.snapshot()
        moved, took = parts.herald.bytes, parts.herald.seconds
        await self._end(groups, reports, step)
        parts.feeder.trained_batches = step
        parts.herald.publish(Version(self._so_far.incarnation, step))
        await parts.grower.notify()
        facts = [measure.facts(one.score, one.response_tokens, one.generated.finish_reason) for one in grown]
        return {
            **measure.sample_metrics(facts, constant, len(groups), parts.world),
            **reports[0].metrics,
            **measure.token_metrics(parts.queue, parts.world),
            **self._lag_metrics(grown, step - 1),
            "train/skipped_steps": reports[0].bad_updates,
            "sync/bytes": moved,
            "sync/seconds": took,
            "sync/version": step,
            "async/restarts": self._so_far.restarts,
            "async/replaced": parts.herald.replaced + parts.rewards.replaced,
            "memory/peak_bytes": await parts.trainers.peak_memory(),
            "tokens/step": parts.queue.tokens.generated - before[0],
            "tokens/step_trained": parts.queue.tokens.trained - before[1],
        }

    async def _batch(self, step: int) -> list[list[Grown]]:
        """The oldest complete groups that are not too old, as many as a step takes."""
        wanted, found = self._config.rollout.prompts_per_step, list[list[Grown]]()
        try:
            async with asyncio.timeout(self._config.rollout.timeout_s):
                while len(found) < wanted:
                    found += await self._fresh(step - 1, wanted - len(found))
                    self._check_failures()
                    if len(found) < wanted:
                        async with self._parts.grower.changed:
                            await self._parts.grower.changed.wait_for(lambda: bool(self._parts.queue.ready))
        except TimeoutError:
            raise RunError(
                f"step {step} has {len(found)} of {wanted} groups after rollout.timeout_s = "
                f"{self._config.rollout.timeout_s:g} s; {len(self._parts.queue.open_groups)} are under way"
            ) from None
        return sorted(found, key=lambda group: group[0].group_id)

    async def _fresh(self, trainer: int, limit: int) -> list[list[Grown]]:
        """Complete groups that version number `trainer` may be trained on; the others end here."""
        good, ended = [], []
        for group_id, group in self._parts.queue.take(limit).items():
            old = max((lag(one.generated.spans, trainer) for one in group), default=0)
            if len(group) < 2:
                self._parts.queue.end_dropped(group_id, "group_too_small")
            elif old <= self._config.mode.max_staleness:
                good.append(group)
                continue
            elif self._config.mode.stale == "drop":
                self._parts.queue.end_dropped(group_id, "stale")
            else:
                self._parts.queue.give_back(group_id)
                self._parts.feeder.again.append(group_id)
            ended += [one.key for one in group]
        await asyncio.to_thread(self._parts.bus.clear, ended)
        if ended:
            await self._parts.grower.notify()
        return good

    def _shares(self, groups: Sequence[Sequence[Grown]]) -> tuple[list[Share], int]:
        """A share for each rank, whole groups, and how many groups have no variance in their rewards."""
        grown = [one for group in groups for one in group]
        rewards = [one.score.reward for one in grown if one.score.reward is not None]
        assert len(rewards) == len(grown), "only scored samples are offered"
        found, constant = group_advantages(self._config.algorithm.advantage, rewards, [one.group_id for one in grown])
        advantage = {one.key: value for one, value in zip(grown, found, strict=True)}
        shares = []
        for rank in range(self._parts.trainers.size):
            keys = [one.key for group in groups[rank :: self._parts.trainers.size] for one in group]
            shares.append(Share(keys, [advantage[key] for key in keys]))
        return shares, constant

    async def _end(self, groups: Sequence[Sequence[Grown]], reports: Sequence[StepReport], step: int) -> None:
        """End the reservations of the batch, write the ledger and clear the bus."""
        skipped = frozenset[int]().union(*(report.skipped_groups for report in reports))
        queue, rows = self._parts.queue, []
        for group in groups:
            group_id = group[0].group_id
            if group_id in skipped:
                queue.end_dropped(group_id, "bad_update")
            else:
                queue.end_trained(group_id)
                rows.append(group[0].source_row)
        self._parts.log.ledger(step, {"trained": rows, "dropped": dict(queue.drain_reasons())})
        await asyncio.to_thread(self._parts.bus.clear, [one.key for group in groups for one in group])

    def _check_failures(self) -> None:
        """RunError when too many samples since the last look could not be scored."""
        feeder = self._parts.feeder
        total, failed = feeder.grown, list(feeder.failures)
        if total < self._config.rollout.prompts_per_step * self._config.rollout.samples_per_prompt:
            return
        for text in failed:
            self._parts.watch.progress.note(f"dropped {text}")
        feeder.failures.clear()
        feeder.grown = 0
        check_failed_share(failed, total, self._config)

    def _lag_metrics(self, grown: Sequence[Grown], trainer: int) -> dict[str, Any]:
        lags = [lag(one.generated.spans, trainer) for one in grown]
        counts = Counter(lags)
        return {
            "async/lag_mean": sum(lags) / len(lags),
            "async/lag_max": float(max(lags)),
            "async/lag_histogram": [counts[age] for age in range(self._config.mode.max_staleness + 1)],
            "async/versions_mean": sum(len(one.generated.spans) for one in grown) / len(grown),
        }

    async def _keep_samples(self, step: int, grown: Sequence[Grown]) -> None:
        shown = grown[: self._config.telemetry.samples_per_step]
        if shown:
            rollouts = await asyncio.to_thread(self._parts.bus.get, [one.key for one in shown])
            scored = [Scored(one.index, rollout, one.score) for one, rollout in zip(shown, rollouts, strict=True)]
            self._parts.log.samples(step, sample_records("train", scored, self._parts.tokenizer))

    def _finish(self, step: int, metrics: dict[str, Any]) -> None:
        new, trained = metrics.pop("tokens/step"), metrics.pop("tokens/step_trained")
        times = self._parts.watch.timer.metrics()
        metrics |= times
        metrics |= measure.rate_metrics(times, new, trained)
        metrics.pop("rollout/tokens_per_s", None)  # generation goes on beside: the wait for a batch says nothing of it
        metrics["async/trainer_idle_share"] = times.get("time/rollout", 0.0) / times["time/step"]
        self._parts.log.log(step, metrics)
        self._parts.watch.progress.step(step, metrics)

    def _evaluation_due(self, step: int) -> bool:
        every = self._config.eval.every
        return bool(self._parts.heldout) and (step == self._config.steps or bool(every and step % every == 0))

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out prompts with the weights of `step`; a new best is exported to `best/`."""
        parts, so_far = self._parts, self._so_far
        if not parts.heldout:
            return {}
        await parts.herald.settled()
        with parts.watch.timer("eval"):
            evaluation = evaluation_of(await self._answers(step))
        parts.log.samples(step, sample_records("eval", evaluation.shown, parts.tokenizer))
        score = so_far.eval_last = evaluation.metrics.get("eval/score")
        if step == 0:
            so_far.eval_first = score
        elif score is not None and (so_far.best_score is None or score > so_far.best_score):
            so_far.best_step, so_far.best_score = step, score
            with parts.watch.timer("checkpoint"):
                await self._keep_best(step, score)
        return evaluation.metrics

    async def _answers(self, step: int) -> list[Scored]:
        parts = self._parts
        jobs = eval_jobs(self._config, parts.heldout, range(len(parts.heldout)))
        sampling = eval_sampling(self._config)
        groups = await asyncio.gather(
            *(parts.grower.grow(_HELD_OUT + job.id, job.prompt, job.seeds, sampling, step) for job in jobs)
        )
        scored = []
        for job, group in zip(jobs, groups, strict=True):
            whole = [one for one in group if one.why_dropped is None]
            rollouts = await asyncio.to_thread(parts.bus.get, [one.key for one in whole]) if whole else []
            scored += [
                Scored(one.index, rollout.regrouped(job.id), one.score)
                for one, rollout in zip(whole, rollouts, strict=True)
            ]
            await asyncio.to_thread(parts.bus.clear, [one.key for one in group])
        return scored

    async def _keep_best(self, step: int, score: float) -> None:
        async def fill(directory: Path) -> None:
            await self._parts.trainers.export(directory)
            (directory / "best.json").write_text(json.dumps({"step": step, "score": score}) + "\n")

        best, world = self._parts.run_dir / "best", self._parts.world
        try:
            await _in_thread(lambda call: write_directory(best, lambda directory: call(fill(directory)), world))
        except OSError as error:
            raise RunError(f"the best model so far could not be written: {error}; make room and resume") from error

    def _checkpoint_due(self, step: int) -> bool:
        every = self._config.checkpoint.every
        return step == self._config.steps or bool(every and step % every == 0)

    async def _save(self, step: int) -> None:
        async def write(directory: Path) -> None:
            for name, save in (("state", self._parts.trainers.save), ("hf", self._parts.trainers.export)):
                (directory / name).mkdir()
                await save(directory / name)

        feeder, queue, store = self._parts.feeder, self._parts.queue, self._parts.checkpoints
        so_far = self._so_far
        so_far.next, so_far.again = feeder.next, sorted([*feeder.again, *queue.open_groups])
        so_far.tokens, so_far.trained = queue.tokens, queue.tokens.trained
        state = asdict(so_far)
        with self._parts.watch.timer("checkpoint"):
            await _in_thread(lambda call: store.save(step, state, lambda directory: call(write(directory))))


async def _in_thread(work: Callable[[Callable[[Awaitable[None]], None]], None]) -> None:
    """Do `work` in a thread; it may have the loop do what it is given."""
    loop = asyncio.get_running_loop()

    def call(one: Any) -> None:
        asyncio.run_coroutine_threadsafe(one, loop).result()

    await asyncio.to_thread(work, call)
