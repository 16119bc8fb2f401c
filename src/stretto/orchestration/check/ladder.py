"""The rungs in order, climbed by every rank together until one breaks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from stretto.models.checkpoint import load_config
from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.memory import forecast
from stretto.orchestration.check.numbers import gradients, logits
from stretto.orchestration.check.peak import resident_bytes
from stretto.orchestration.check.probe import Probe
from stretto.orchestration.check.report import Failure, Outcome, Report, Rung
from stretto.orchestration.check.roundtrip import round_trip
from stretto.orchestration.check.serving import after_a_step, agreement
from stretto.orchestration.check.settings import CheckSettings
from stretto.orchestration.check.sides import family, mapped, planned
from stretto.world import World

Climb = Callable[[Bench], Outcome]

LADDER: tuple[tuple[str, Climb], ...] = (
    ("family", family),
    ("mapped", mapped),
    ("plan", planned),
    ("round trip", round_trip),
    ("logits", logits),
    ("gradients", gradients),
    ("engine", agreement),
    ("step and sync", after_a_step),
    ("memory", forecast),
)
_PROCESS_BYTES = 400 * 2**20


def climb(
    settings: CheckSettings, probe: Probe, work: Path, world: World, told: Callable[[Report], None] = lambda _: None
) -> Report:
    """Climb on this rank and report; `told` hears of the report so far after each rung.

    A rung that raises is broken: with several ranks, only this one may know, and the caller has to end them all.
    """
    report = Report(
        {
            "model": settings.model,
            "trainer": f"{settings.title()} on {world.size} {world.device.type} rank{'s' * (world.size > 1)}",
            "engine": settings.engine + (f"(tp={settings.engine_tp})" if settings.engine_tp > 1 else ""),
            "dtype": settings.dtype,
            "probe": probe.says,
        },
        rungs := [],
    )
    with ExitStack() as stack:
        hf_config = load_config(probe.directory)
        config = settings.config()
        bench = Bench(settings, probe, world, work, stack, config, hf_config, resident_bytes() or _PROCESS_BYTES)
        broken = None
        for name, rung in LADDER:
            start = time.monotonic()
            outcome = _climb(bench, rung) if broken is None else Outcome("skipped", f"not reached: {broken} broke")
            rungs.append(Rung(name, outcome, time.monotonic() - start))
            broken = broken or (name if outcome.status == "fail" else None)
            told(report)
    return report


def _climb(bench: Bench, rung: Climb) -> Outcome:
    """The rung's outcome, the same on every rank: a failure of any is everyone's."""
    try:
        outcome = rung(bench)
    except Exception as error:
        if bench.world.size > 1:
            raise
        return broke(error)
    outcomes = bench.world.gather(outcome)
    return next((one for one in outcomes if one.status == "fail"), outcomes[0])


def broke(error: BaseException) -> Outcome:
    """The outcome of a rung that raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    evidence = f"{type(error).__name__} in {Path(where.filename).name}, {where.name}: {error}"
    return Outcome("fail", str(error), failure=Failure(None, f"it raised {type(error).__name__}", evidence))
