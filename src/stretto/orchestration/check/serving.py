"""The engine against the trainer: what it samples, before and after an optimizer step and a publication."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from torch import Tensor

from stretto.orchestration.check.bench import Bench, flat
from stretto.orchestration.check.compare import FileTensors, relative
from stretto.orchestration.check.numbers import BOUND, NOISE_FACTOR
from stretto.orchestration.check.peak import begin_peak, peak_bytes
from stretto.orchestration.check.reference import Reference
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.check.roundtrip import engine_holds, export, trainer_holds
from stretto.orchestration.check.samples import requests, to_rollouts, training_batch
from stretto.sync.files import CheckpointFiles
from stretto.trainers import StepReport
from stretto.types import Batch, Rollout
from stretto.world import local_part

TEMPERATURE = 0.7
NEW_TOKENS = 8
_DEADLINE_S = 600.0


def agreement(bench: Bench) -> Outcome:
    """Log-probs of samples that the engines really draw at T = 0.7, and the trainer's of the same."""
    if bench.generates is None:
        return Outcome("skipped", f"a live {bench.settings.engine} is not checked")
    drawn = _draw(bench)
    measured = _apart(bench, drawn)
    bound = BOUND if bench.exact else max(BOUND, 2 * NOISE_FACTOR * bench.noise)
    if measured <= bound:
        return Outcome(
            "pass", f"log-probs at T = {TEMPERATURE} within {measured:.1e} (bound {bound:.1e})", measured, bound
        )
    failure = _whose(bench, drawn, bound)
    why = f"the engine's log-probs at T = {TEMPERATURE} are {measured:.1e} off the trainer's (bound {bound:.1e})"
    return Outcome("fail", why, measured, bound, failure)


def _draw(bench: Bench) -> list[Rollout]:
    """This rank's samples."""
    assert bench.generates is not None
    asked = requests(bench.tokens, bench.world.rank, TEMPERATURE, NEW_TOKENS)
    return to_rollouts(asked, list(bench.generates.generate(asked, deadline_s=_DEADLINE_S)))


def _apart(bench: Bench, drawn: Sequence[Rollout]) -> float:
    scored = bench.trainer.logprobs(drawn)
    return bench.world.max([relative(flat([one.logprobs_T for one in drawn]), flat(scored))])[0]


def _whose(bench: Bench, drawn: Sequence[Rollout], bound: float) -> Failure:
    """Ask transformers, with the weights that the trainer exports, which of the two is right."""
    exported = export(bench, "disputed")
    scored = bench.trainer.logprobs(drawn)
    failure = None
    if bench.world.first:
        expected = flat(Reference(exported, bench.dtype, bench.world.device).logprobs(drawn))
        engine = relative(flat([one.logprobs_T for one in drawn]), expected)
        trainer = relative(flat(scored), expected)
        who = "the engine" if engine > trainer else "the trainer"
        said = f"the engine is {engine:.1e} off transformers with the same weights, the trainer {trainer:.1e}"
        failure = Failure(None, f"{who} computes something else (temperature, positions or attention)", said)
    return bench.world.from_first(failure)


def after_a_step(bench: Bench) -> Outcome:
    """One optimizer step and one publication; then replicas, the engine's weights and its log-probs anew."""
    before = bench.copies()
    served = {name: one.clone() for name, one in bench.engine.weights().items()} if bench.engine else {}
    batch = training_batch(bench.tokens)
    mine = slice(bench.world.rank, None, bench.world.size)
    begin_peak(bench.world)
    report: StepReport = bench.publish(lambda: bench.trainer.step(Batch(batch.rollouts[mine], batch.advantages[mine])))
    if failure := _unmoved(bench, report, before):
        return Outcome("fail", failure.evidence, failure=failure)
    outcome = agreement(bench)
    bench.seen_bytes = peak_bytes(bench.world)
    exported = export(bench, "stepped")
    with CheckpointFiles(exported) as files:
        failure = trainer_holds(bench, FileTensors(files), before, rounded=True)
    failure = next((one for one in bench.world.gather(failure) if one), None)
    failure = failure or next((one for one in bench.world.gather(engine_holds(bench, exported, served)) if one), None)
    if bench.world.first:
        shutil.rmtree(exported)
    if failure is not None:
        return Outcome("fail", f"{failure.parameter}: {failure.kind}", failure=failure)
    if outcome.status == "skipped":
        return Outcome("pass", "replicas are equal after the step; " + outcome.reason)
    has = "what transformers loads of the export" if bench.engine else "the trainer's weights"
    said = f"replicas are equal, the engine has {has}; {outcome.reason}"
    return outcome if outcome.status == "fail" else Outcome("pass", said, outcome.measured, outcome.bound)


def _unmoved(bench: Bench, report: StepReport, before: Mapping[str, Tensor]) -> Failure | None:
    """A step that was skipped, or moved nothing on this rank."""
    if report.updates != 1 or report.bad_updates:
        said = f"the step was skipped: gradient norm {report.metrics.get('train/grad_norm')}"
        return Failure(None, "a gradient that is not finite", said)
    now = bench.trainer.weights()
    moved = any(not local_part(now[name].detach()).equal(old) for name, old in before.items())
    still = [rank for rank, one in enumerate(bench.world.gather(moved)) if not one]
    if still:
        return Failure(None, "no weight moved", f"one step moved no weight of ranks {still}")
    return None
