"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ENGINES, Factory
from vllm_servers import VllmServers

from vllm_here import vllm_python


@pytest.fixture(params=[*ENGINES, "vllm"])
def serve(request: pytest.FixtureRequest) -> Iterator[Factory]:
    """Each engine in turn: `serve(model_directory, max_sequences=..., eos_ids=...)`."""
    if request.param in ENGINES:
        yield ENGINES[request.param]
        return
    vllm_python()
    servers: VllmServers = request.getfixturevalue("vllm_servers")
    yield servers.serve
    servers.end_test()


@pytest.fixture(scope="session")
def wide_model(save_tiny: Callable[[Any], Path], tiny_model: Path) -> Path:
    """Like `tiny_model`, with heads of 32: the smallest that vLLM serves on CPU."""
    from transformers import AutoConfig, LlamaConfig

    tiny = AutoConfig.from_pretrained(tiny_model)
    return save_tiny(
        LlamaConfig(
            vocab_size=tiny.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tiny.eos_token_id,
        )
    )


@pytest.fixture(scope="session")
def vllm_servers(tiny_model: Path, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Started by the first test that needs one."""
    servers = VllmServers(tiny_model, wide_model, tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[Any], Path]:
    """Saves a small random model of any configuration, with the tokenizer of `tiny_model`."""

    def save(config: Any) -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1, which would hide a wrong one
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
        return directory

    return save
