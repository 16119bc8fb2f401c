"""What `trainer.compile` changes: the time of a step, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from trainer_samples import mixed_batch, new_trainer, run_config, with_behaviour


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_loss_and_gradient_are_those_of_the_trainer_that_is_not_compiled(tiny_model: Path, batching: str) -> None:
    settings = {"dtype": "float32", "batching": batching, "logit_chunk_tokens": 8, "micro_batch_tokens": 64}
    plain = new_trainer(tiny_model, run_config(settings))
    compiled = new_trainer(tiny_model, run_config({**settings, "compile": True}))
    batch = with_behaviour(plain, mixed_batch(97), noise=0.3)
    expected_loss, expected = plain.gradient(batch)
    loss, found = compiled.gradient(batch)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
