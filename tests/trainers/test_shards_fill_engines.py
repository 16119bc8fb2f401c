"""Two sharded ranks, each with an engine of its own: what the engines hold is the trainer's weights, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_samples import mixed_batch, new_trainer, run_config, share, values
from transformers import AutoModelForCausalLM

from ranks import Ranks
from stretto.engines.embedded import EmbeddedEngine
from stretto.orchestration.engines import connect_embedded
from stretto.sync import files
from stretto.sync.publication import Publisher
from stretto.types import Version
from stretto.world import World

BATCH = mixed_batch(97)
HALVES = ((0, 1, 2, 5, 6, 7), (3, 4, 8, 9))
SETTINGS = {"dtype": "float32", "lr": 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra_bytes", [2**29, 4000])
def test_every_engine_has_the_weights_of_every_version(
    tiny_model: Path, pair: Ranks, dtype: torch.dtype, extra_bytes: int
) -> None:
    """Also through buckets of a thousand bytes: one for each shard."""
    for rank in pair.run(publish_and_step, tiny_model, dtype, extra_bytes):
        assert rank["transport"] == "collective"
        assert rank["tied"]
        assert len(rank["versions"]) == 3
        for engine, trainer, moved in rank["versions"]:
            assert engine.keys() == trainer.keys()
            for name, tensor in trainer.items():
                assert tensor.dtype == torch.float32
                assert torch.equal(engine[name], tensor.to(dtype)), name
            assert moved == sum(tensor.nbytes for tensor in engine.values())
        first, last = rank["versions"][0][0], rank["versions"][-1][0]
        assert not any(torch.equal(first[name], last[name]) for name in first)
        assert rank["addresses"][0] == rank["addresses"][-1]


def publish_and_step(world: World, directory: Path, dtype: torch.dtype, extra_bytes: int) -> dict[str, Any]:
    trainer = new_trainer(directory, run_config(SETTINGS), world)
    engine = EmbeddedEngine(
        directory,
        None,
        device=world.device,
        dtype=dtype,
        eos_ids=(),
        max_length=64,
        max_sequences=4,
        replicas=world.size,
    )
    publisher = Publisher(engine, connect_embedded(trainer, engine, world, extra_bytes))
    seen: dict[str, Any] = {"transport": publisher.transport, "versions": [], "addresses": []}
    for number in range(3):
        publisher.open(Version(1, number))
        if number:
            trainer.step(share(BATCH, HALVES[world.rank]))
        moved = publisher.close()
        held = {name: tensor.detach().clone() for name, tensor in engine.weights().items()}
        seen["versions"].append((held, values(trainer), moved))
        seen["addresses"].append([tensor.data_ptr() for tensor in engine.weights().values()])
    module: Any = engine._module
    seen["tied"] = module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_of_two_ranks_in_several_files_is_what_transformers_loads(
    tiny_model: Path, pair: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    weights, _ = pair.run(export_in_parts, tiny_model, tmp_path, dtype)
    table = json.loads((tmp_path / files.INDEX).read_text())["weight_map"]
    assert table.keys() == weights.keys(), "the tied head is there once"
    assert len(set(table.values())) == len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded: Any
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    exported = dict(loaded.named_parameters())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], tensor.to(dtype)) for name, tensor in weights.items())
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def export_in_parts(world: World, directory: Path, out: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    trainer = new_trainer(directory, run_config(SETTINGS), world)
    trainer.step(share(BATCH, HALVES[world.rank]))
    whole_file, files._FILE_BYTES = files._FILE_BYTES, 60_000
    try:
        trainer.export(out, dtype)
    finally:
        files._FILE_BYTES = whole_file
    return values(trainer)
