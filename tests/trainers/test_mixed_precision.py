"""bfloat16 compute over float32 master weights, on one CPU process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_samples import mixed_batch, new_trainer, run_config, values, with_behaviour

from stretto.world import leave_world


@pytest.fixture
def own_group() -> Iterator[None]:
    """Mixed precision makes a process group of one; the tests after this one must not find it."""
    yield
    leave_world()


@pytest.mark.usefixtures("own_group")
def test_masters_stay_float32_and_the_loss_close_to_float32s(tiny_model: Path) -> None:
    exact = new_trainer(tiny_model, run_config({"dtype": "float32", "lr": 1e-3}))
    batch = with_behaviour(exact, mixed_batch(97), noise=0.3)
    mixed = new_trainer(tiny_model, run_config({"dtype": "bfloat16", "lr": 1e-3}))
    seen: set[torch.dtype] = set()
    mixed._policy.model.lm_head.register_forward_hook(lambda _module, _input, output: seen.add(output.dtype))
    before = values(mixed)
    assert all(torch.equal(before[name], tensor) for name, tensor in values(exact).items())
    for _ in range(3):
        expected, found = exact.step(batch).metrics, mixed.step(batch).metrics
        assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=0.02)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.1)
    assert seen == {torch.bfloat16}
    after = values(mixed)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert {t.dtype for slot in mixed._optimizer.state.values() for t in slot.values()} == {torch.float32}
    # Steps smaller than bfloat16 can hold arrive: the masters are not its values.
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in after.values())
