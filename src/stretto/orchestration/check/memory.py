"""The last rung: the memory forecast of `stretto train --dry-run` against what the step and the sampling took."""

from __future__ import annotations

from math import ceil

from stretto.orchestration.check.bench import Bench
from stretto.orchestration.check.report import Failure, Outcome
from stretto.orchestration.footprint import Footprint, footprint, passes, replicas, slabs

FACTOR = 3.0
"""How far above its forecast a process may be: allocators keep what was freed, and a check holds copies of its own."""
_MIB = 2**20
_PROCESS = "process"
_PROMPT = 12
"""Tokens of the longest prompt."""


def forecast(bench: Bench) -> Outcome:
    """Seen over forecast, of the ranks with the most. Only more than so many times the forecast is a failure."""
    if bench.engine is None:
        return Outcome("skipped", "there is a forecast for the embedded engine alone")
    said = _said(bench)
    if said is None:
        return Outcome("skipped", "no weight map says which weights of this family are on which Megatron rank")
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


def _said(bench: Bench) -> Footprint | None:
    """The forecast for the check's own step and samples."""
    config, world = bench.config, bench.world
    groups = config.rollout.prompts_per_step
    largest = slabs(groups, config.rollout.samples_per_prompt, _PROMPT, config.rollout.max_new_tokens, groups * 2)
    micro = passes(config, ceil(groups / replicas(config, world.size)), _PROMPT)
    return footprint(bench.probe.directory, config, world, largest, micro)
