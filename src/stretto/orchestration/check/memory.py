"""The last rung: the memory forecast of `stretto train --dry-run` against what the step and the sampling took."""

from __future__ import annotations

from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.footprint import footprint, passes, slabs

FACTOR = 3.0
"""How far above its forecast a process may be: allocators keep what was freed, and a check holds copies of its own."""
_MIB = 2**20
_PROCESS = "process"


def forecast(bench: Bench) -> Outcome:
    """Seen over forecast. Only more than so many times the forecast is a failure."""
    if bench.settings.trainer != "fsdp" or bench.engine is None:
        return Outcome("skipped", "there is a forecast for the fsdp trainer with the embedded engine alone")
    config = bench.config
    prompt, groups = 12, config.rollout.prompts_per_step
    largest = slabs(groups, config.rollout.samples_per_prompt, prompt, config.rollout.max_new_tokens, groups * 2)
    said = footprint(bench.probe.directory, config, bench.world, largest, passes(config, groups, prompt))
    own = sum(part for name, part in said.standing.items() if name.endswith("weights"))
    process = bench.base_bytes if bench.world.device.type != "cuda" else 0
    expected = said.total - said.standing[_PROCESS] + process + own
    ratio = bench.seen_bytes / expected
    text = (
        f"{bench.seen_bytes / _MIB:.0f} MiB seen, {expected / _MIB:.0f} MiB forecast ({process / _MIB:.0f} of the bare "
        f"process, {own / _MIB:.0f} of copies that the check keeps): {ratio:.2f} times as much, at most {FACTOR:g}"
    )
    if ratio <= FACTOR:
        return Outcome("pass", text, ratio, FACTOR)
    return Outcome("fail", text, ratio, FACTOR, Failure(None, "the forecast is too low", text))
