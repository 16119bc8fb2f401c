"""The fully asynchronous column of the matrix: both trainers, in two processes each, with the engines that run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_helpers import complete, lines, write_run

STEPS = 5
TRAINERS: dict[str, dict[str, Any]] = {"fsdp": {}, "megatron": {"backend": "megatron", "tp": 2}}
BOUNDS = [0, 1, 3]


def check_cell(directory: Path, model: Path, trainer: str, engine: dict[str, Any], bound: int) -> None:
    """Versions rise by one, no sample is too old, tokens add up, and what a version samples is what it should."""
    file = write_run(
        directory,
        model,
        steps=STEPS,
        trainer={"lr": 1e-2 if bound == 0 else 1e-9, "updates_per_batch": 1} | TRAINERS[trainer],
        engine=engine,
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 12, "temperature": 0.7},
        algorithm={"kl_coef": 0.0},
        eval={"every": 0},
        checkpoint={"every": 0},
        data={"heldout": 2},
        mode={"kind": "fully_async", "max_staleness": bound},
        launch={"backend": "ray"},
        placement={"trainers": 2},
    )
    complete("train", file)
    found = lines(directory / "run" / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    for line in found[1:]:
        assert line["sync/version"] == line["step"]
        assert line["async/lag_max"] <= bound
        # With a bound the weights stand still but for their last bits, so that what an older version sampled has the
        # trainer's log-probs too; without one each step's own weights must.
        assert line["mismatch/logprob_diff_max"] < 3e-5
        tokens = {name: line[f"tokens/{name}"] for name in ("generated", "trained", "dropped", "in_flight")}
        assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["in_flight"]
    if bound == 0:
        assert found[1]["train/loss"] != found[STEPS]["train/loss"], "the weights did change"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_embedded_engine(tmp_path: Path, tiny_model: Path, trainer: str, bound: int) -> None:
    check_cell(tmp_path, tiny_model, trainer, {"max_sequences": 16}, bound)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("trainer", "bound"), [("fsdp", 0), ("fsdp", 3), ("megatron", 1)])
def test_a_vllm_server(tmp_path: Path, qwen3: Path, vllm: str, trainer: str, bound: int) -> None:
    options = {"enforce_eager": True, "gpu_memory_utilization": 0.12}
    check_cell(
        tmp_path, qwen3, trainer, {"backend": "vllm", "python": vllm, "max_sequences": 16, "vllm": options}, bound
    )
