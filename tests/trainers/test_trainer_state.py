"""Saving, loading on any number of ranks, exporting, and moving the optimizer out of the way."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_samples import mixed_batch, new_trainer, run_config, share, values, worst
from transformers import AutoModelForCausalLM, AutoTokenizer

from ranks import Ranks
from stretto.config import RunConfig
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Batch
from stretto.world import World

BATCH = mixed_batch(97)
Run = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]  # weights, losses of three steps, weights after them
HALVES = ((0, 1, 2, 5, 6, 7), (3, 4, 8, 9))


def config() -> RunConfig:
    settings = {"dtype": "float32", "lr": 2e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}
    return run_config(settings, steps=8)


def trained(directory: Path, steps: int, world: World | None = None) -> FSDPTrainer:
    trainer = new_trainer(directory, config(), *([world] if world else []))
    for _ in range(steps):
        trainer.step(mine(world))
    return trainer


def mine(world: World | None) -> Batch:
    return share(BATCH, HALVES[world.rank]) if world else BATCH


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(trainer: FSDPTrainer, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    trainer.save(directory)
    return directory


def test_a_loaded_trainer_goes_on_bitwise(tiny_model: Path, tmp_path: Path) -> None:
    straight = trained(tiny_model, 2)
    loaded = new_trainer(tiny_model, config())
    loaded.load(saved(straight, tmp_path / "state"))
    assert same(values(loaded), values(straight))
    for _ in range(3):
        assert loaded.step(BATCH) == straight.step(BATCH)
    assert same(values(loaded), values(straight))


def test_saving_changes_nothing_even_before_the_first_step(tiny_model: Path, tmp_path: Path) -> None:
    straight, saver, loaded = (new_trainer(tiny_model, config()) for _ in range(3))
    loaded.load(saved(saver, tmp_path / "state"))
    expected = [straight.step(BATCH) for _ in range(3)]
    assert [saver.step(BATCH) for _ in range(3)] == expected
    assert [loaded.step(BATCH) for _ in range(3)] == expected
    assert same(values(loaded), values(straight))


def test_two_ranks_load_what_one_saved(tiny_model: Path, pair: Ranks, tmp_path: Path) -> None:
    straight = trained(tiny_model, 2)
    saved(straight, tmp_path / "state")
    at_load = values(straight)
    expected = [straight.step(BATCH).metrics["train/loss"] for _ in range(3)]
    for loaded, losses, final in pair.run(load_and_go_on, tiny_model, tmp_path / "state"):
        assert same(loaded, at_load)
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6
        assert worst(final, values(straight)) < 1e-5


def load_and_go_on(world: World, directory: Path, state: Path) -> Run:
    trainer = new_trainer(directory, config(), world)
    trainer.load(state)
    loaded = values(trainer)
    return loaded, [trainer.step(mine(world)).metrics["train/loss"] for _ in range(3)], values(trainer)


def test_one_rank_loads_what_two_saved(tiny_model: Path, pair: Ranks, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (at_save, expected, final), _ = pair.run(save_and_go_on, tiny_model, tmp_path / "state")
    loaded = new_trainer(tiny_model, config())
    loaded.load(tmp_path / "state")
    assert same(values(loaded), at_save)
    losses = [loaded.step(BATCH).metrics["train/loss"] for _ in range(3)]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6
    assert worst(values(loaded), final) < 1e-5


def save_and_go_on(world: World, directory: Path, state: Path) -> Run:
    trainer = trained(directory, 2, world)
    trainer.logprobs(mine(world).rollouts)  # a pass without a backward leaves the root gathered
    trainer.save(state)
    at_save = values(trainer)
    return at_save, [trainer.step(mine(world)).metrics["train/loss"] for _ in range(3)], values(trainer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_is_the_policy_in_the_dtype_asked_for(tiny_model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(source)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(source)
    trainer = trained(source, 2)
    out.mkdir()
    trainer.export(out, dtype)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.dtype == dtype
    rounded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    rounded.load_state_dict({name: tensor.to(dtype) for name, tensor in values(trainer).items()}, strict=False)
    ids = torch.tensor([BATCH.rollouts[3].prompt_ids])
    with torch.no_grad():
        logits = exported(ids).logits
        assert torch.equal(logits, rounded(ids).logits)
        assert not torch.equal(logits, AutoModelForCausalLM.from_pretrained(source, dtype=dtype)(ids).logits)
    text = "12 + 3 = 15"
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == AutoTokenizer.from_pretrained(source)(text).input_ids


def test_two_ranks_export_the_whole_model(tiny_model: Path, pair: Ranks, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    weights, _ = pair.run(export_on_two_ranks, tiny_model, tmp_path / "out")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    assert same(exported, weights)


def export_on_two_ranks(world: World, directory: Path, out: Path) -> dict[str, Tensor]:
    trainer = trained(directory, 1, world)
    trainer.export(out, torch.float32)
    return values(trainer)


def test_offload_and_onload_keep_every_value(tiny_model: Path) -> None:
    straight, moved = trained(tiny_model, 2), trained(tiny_model, 2)
    moved.offload()
    moved.onload()
    assert moved.step(BATCH) == straight.step(BATCH)
    assert same(values(moved), values(straight))
