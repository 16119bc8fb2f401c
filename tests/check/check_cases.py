"""Models that checks run on, and a check as a job of some ranks."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import check_faults
from family_cases import CASES

from stretto.orchestration.check import CheckSettings
from stretto.orchestration.check.ladder import climb
from stretto.orchestration.check.probe import Probe, make_probe
from stretto.sync.coordinates import atoms_of
from stretto.world import World

_SQUARE: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def config_of(case: str) -> Any:
    """A case of the families, or `square`: experts whose matrices have as many rows as columns."""
    if case == "square":
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**_SQUARE)
    return CASES[case]()


def write_config(case: str, directory: Path) -> str:
    """The config.json of a case, which is all that a check needs."""
    config_of(case).save_pretrained(directory)
    return str(directory / "config.json")


def report_of(world: World, case: str, directory: Path, settings: dict[str, Any], fault: str | None) -> dict[str, Any]:
    """The report of one check, as data, with a fault injected. A job of ranks, in a directory that goes with it."""
    probe, chosen = _prepared(world, case, directory, settings)
    with check_faults.FAULTS[fault]() if fault else nullcontext():
        atoms_of.cache_clear()
        report = climb(chosen, probe, directory, world).to_dict()
    atoms_of.cache_clear()
    world.barrier()
    if world.first:
        shutil.rmtree(directory)
    return report


def _prepared(world: World, case: str, directory: Path, settings: dict[str, Any]) -> tuple[Probe, CheckSettings]:
    chosen = CheckSettings(model=str(directory / "config.json"), **settings)
    probe = None
    if world.first:
        write_config(case, directory)
        probe = make_probe(chosen.model, directory, dtype=chosen.dtype, layers=chosen.layers, stages=chosen.stages)
    return world.from_first(probe), chosen


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    """Status of every rung."""
    return {rung["name"]: rung["status"] for rung in report["rungs"]}


def broken(report: dict[str, Any]) -> str | None:
    """The rung that broke."""
    return next((rung["name"] for rung in report["rungs"] if rung["status"] == "fail"), None)
