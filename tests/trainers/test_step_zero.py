"""The first step on fresh samples: engine and trainer agree on every log-prob."""

from pathlib import Path

import pytest
import torch
from trainer_samples import new_trainer, run_config

from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import load_tokenizer
from stretto.types import Batch, Request, Rollout, Sampling, Version

PROMPTS = ("23 + 4 = 27\n31 + 5 =", "The capital of France is", "Once", "def add(a, b):\n    return")


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("model", ["tiny_model", "smollm2_cut"])
def test_ratio_is_one_and_engine_and_trainer_agree(request: pytest.FixtureRequest, model: str, batching: str) -> None:
    directory: Path = request.getfixturevalue(model)
    trainer = new_trainer(directory, run_config({"dtype": "float32", "batching": batching, "lr": 1e-3}))
    tokenizer = load_tokenizer(directory)
    engine = EmbeddedEngine(
        directory,
        tokenizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        eos_ids=(),
        max_length=128,
        max_sequences=16,
    )
    engine.adopt(trainer.weights())
    engine.prepare(Version(1, 0))
    engine.commit(Version(1, 0))
    rollouts = sample(engine, tokenizer)
    lengths = {len(rollout.response_ids) for rollout in rollouts}
    assert len(lengths) > 1, "mixed response lengths are the point"
    metrics = trainer.step(Batch(rollouts, [(-1.0) ** i * (1 + i / 8) for i in range(len(rollouts))])).metrics
    assert metrics["train/ratio_mean"] == 1
    assert metrics["train/ratio_max_deviation"] == 0
    assert metrics["train/clip_fraction"] == 0
    assert metrics["mismatch/logprob_diff_mean"] < 1e-5
    # The cut's logits reach 80 at this temperature, where neighbours in float32 are 7.6e-6 apart: either side alone is
    # up to 1.3e-5 away from float64.
    assert metrics["mismatch/logprob_diff_max"] < (1e-5 if model == "tiny_model" else 4e-5)
    assert metrics["mismatch/kl"] < 1e-9
    assert metrics["train/grad_norm"] > 0


def sample(engine: EmbeddedEngine, tokenizer) -> list[Rollout]:
    requests = [
        Request(i, tuple(tokenizer(text).input_ids), (10 * i, 10 * i + 1), Sampling(4 + 3 * i, temperature=0.8))
        for i, text in enumerate(PROMPTS)
    ]
    return [
        Rollout.of(
            one,
            requests[one.request_id].prompt_ids,
            temperature=0.8,
            group_id=one.request_id,
            source_row=one.request_id,
        )
        for one in engine.generate(requests, deadline_s=60)
    ]
