"""A non-finite loss or gradient: the step is skipped, counted, and too many in a row stop the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_samples import mixed_batch, new_trainer, run_config, values

from stretto.errors import RunError
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Batch

GOOD = mixed_batch(97)


def nan_behaviour() -> Batch:
    """A loss token without a behaviour log-prob: the loss itself is not a number."""
    first = GOOD.rollouts[0]
    return Batch([replace(first, logprobs_T=(float("nan"),) * 4), *GOOD.rollouts[1:]], GOOD.advantages)


def huge_advantage() -> Batch:
    """The loss is finite; squaring the gradient for its norm overflows float32."""
    return Batch(GOOD.rollouts, [1e25, *GOOD.advantages[1:]])


@pytest.fixture
def trainer(tiny_model: Path) -> FSDPTrainer:
    settings = {"dtype": "float32", "lr": 1e-2, "warmup_steps": 4, "weight_decay": 0.1, "max_bad_steps": 3}
    return new_trainer(tiny_model, run_config(settings, {"mismatch": "truncate"}))


def snapshot(trainer: FSDPTrainer) -> list[torch.Tensor]:
    slots = trainer._optimizer.state.values()
    return [*values(trainer).values(), *(tensor.clone() for slot in slots for tensor in slot.values())]


@pytest.mark.parametrize("bad", [nan_behaviour, huge_advantage])
def test_a_bad_step_changes_nothing_bitwise(trainer: FSDPTrainer, bad: Callable[[], Batch]) -> None:
    trainer.step(GOOD)
    before = snapshot(trainer)
    report = trainer.step(bad())
    assert (report.updates, report.bad_updates) == (0, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(trainer), strict=True))
    # Neither the schedule nor the gradient remembers it: the next step is the one that would have come without it.
    following = trainer.step(GOOD)
    assert (following.updates, following.bad_updates) == (1, 0)
    assert following.metrics["train/lr"] == pytest.approx(1e-2 * 2 / 4)


def test_the_next_good_step_is_the_one_without_the_bad_step(tiny_model: Path) -> None:
    ends = []
    for bad in (False, True):
        trainer = new_trainer(tiny_model, run_config({"dtype": "float32", "lr": 1e-2}))
        trainer.step(GOOD)
        if bad:
            trainer.step(nan_behaviour())
        trainer.step(GOOD)
        ends.append(snapshot(trainer))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_too_many_in_a_row_stop_the_run(trainer: FSDPTrainer) -> None:
    for _ in range(2):
        assert trainer.step(nan_behaviour()).bad_updates == 1
    with pytest.raises(RunError, match=r"3 optimizer steps in a row had a non-finite loss \(nan\)"):
        trainer.step(nan_behaviour())


def test_a_good_step_resets_the_count(trainer: FSDPTrainer) -> None:
    for batch in (nan_behaviour(), huge_advantage(), GOOD, nan_behaviour(), huge_advantage()):
        trainer.step(batch)
    with pytest.raises(RunError, match=r"gradient norm \(inf\)"):
        trainer.step(huge_advantage())
