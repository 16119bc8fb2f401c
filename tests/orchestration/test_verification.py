"""Whether the engine computes with the weights that the trainer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import write_run

import stretto
from stretto.config import load_config
from stretto.engines.embedded import EmbeddedEngine
from stretto.errors import RunError
from stretto.models.checkpoint import load_tokenizer
from stretto.orchestration.engines import connect_embedded
from stretto.orchestration.verification import Verification
from stretto.sync.publication import Publisher
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Prompt, Version
from stretto.world import World

ALONE = World(0, 1, torch.device("cpu"))


def published(directory: Path, model: Path, **sync: Any) -> tuple[Verification, EmbeddedEngine]:
    """An engine with weights of its own, those of the trainer as version (0, 1)."""
    config = load_config(
        write_run(directory, model, engine={"dtype": "bfloat16"}, sync={"verify_every": 2, **sync}, algorithm={})
    )
    tokenizer = load_tokenizer(model)
    engine = EmbeddedEngine(
        model,
        tokenizer,
        device=ALONE.device,
        dtype=torch.bfloat16,
        eos_ids=(),
        max_length=64,
        max_sequences=4,
    )
    trainer = FSDPTrainer(model, config, ALONE)
    publisher = Publisher(engine, connect_embedded(trainer, engine, ALONE, 2**20))
    publisher.open(Version(0, 1))
    publisher.close()
    prompt = Prompt(tuple(tokenizer.encode("ax", add_special_tokens=False)), "ax", 0)
    return Verification(config, ALONE, prompt, engine, trainer, publisher), engine


def test_an_engine_with_the_trainers_weights_passes(tiny_model: Path, tmp_path: Path) -> None:
    verification, _ = published(tmp_path, tiny_model)
    assert [number for number in range(5) if verification.due(number)] == [0, 2, 4]
    metrics = verification.run(2)
    assert 0 < metrics["sync/verify_logprob_diff_mean"] <= metrics["sync/verify_logprob_diff_max"] < 0.06


def test_a_tensor_with_another_bit_is_named_with_what_to_run(tiny_model: Path, tmp_path: Path) -> None:
    verification, engine = published(tmp_path, tiny_model)
    name = "model.layers.1.mlp.up_proj.weight"
    engine.weights()[name].view(-1)[:1].view(torch.int16).add_(1)
    with pytest.raises(RunError, match=f"{name}.* `stretto check .* --trainer fsdp --engine embedded`"):
        verification.run(2)


def test_log_probs_beyond_the_bound_stop_the_run(tiny_model: Path, tmp_path: Path) -> None:
    verification, _ = published(tmp_path, tiny_model, verify_bound=1e-9)
    with pytest.raises(RunError, match=r"differ from the trainer's by .* \(at most 1e-09 .*sync\.verify_bound"):
        verification.run(2)


def test_a_run_verifies_every_few_publications(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = stretto.train(load_config(write_run(tmp_path, tiny_model, steps=4, sync={"verify_every": 2})))
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "sync/verify_logprob_diff_mean" in row] == [2, 4]
    assert all(row["sync/verify_logprob_diff_max"] < 1e-4 for row in rows if row["step"] in (2, 4))
    assert all("memory/forecast_bytes" in row for row in rows if row["step"])
