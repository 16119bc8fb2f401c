"""One whole run on the tiny model, which many tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import STARTED, complete, kill, write_run

from vllm_here import vllm_python


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            kill(process, also=lambda below: below)


@pytest.fixture(scope="session")
def whole_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps on one process that nothing disturbed; all its checkpoints are kept."""
    run_file = write_run(tmp_path_factory.mktemp("whole"), tiny_model, checkpoint={"every": 3, "keep": 9})
    complete("train", run_file)
    return run_file.parent / "run"


@pytest.fixture(scope="session")
def vllm() -> str:
    """The interpreter that has vLLM."""
    return vllm_python()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A Qwen3 with heads of 32, which vLLM serves on CPU, and a tied head."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory, tokenizer = tmp_path_factory.mktemp("qwen3"), AutoTokenizer.from_pretrained(tiny_model)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
