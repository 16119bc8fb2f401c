"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ENGINES, Factory
from servers import Servers, sglang, vllm


@pytest.fixture(params=[*ENGINES, "vllm", "sglang"])
def serve(request: pytest.FixtureRequest) -> Iterator[Factory]:
    """Each engine in turn: `serve(model_directory, max_sequences=..., eos_ids=...)`."""
    if request.param in ENGINES:
        yield ENGINES[request.param]
        return
    servers: Servers = request.getfixturevalue(f"{request.param}_servers")
    yield servers.serve
    servers.end_test()


@pytest.fixture(scope="session")
def deep_model(save_tiny: Callable[..., Path], tiny_model: Path) -> Path:
    """A Qwen3 with heads of 64 and a tied head, which servers take where `tiny_model` is too small for their kernels.

    It has 16 MB in float32, so that a copy of it is seen in a process's memory.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    return save_tiny(_qwen3(tiny_model, sizes), noise=0.05)


@pytest.fixture(scope="session")
def heavy_model(save_tiny: Callable[..., Path], tiny_model: Path) -> Path:
    """Like `deep_model`, with the 280 MB that take a publication more than one window."""
    sizes = {"hidden_size": 768, "intermediate_size": 4096, "num_hidden_layers": 7}
    return save_tiny(_qwen3(tiny_model, sizes), noise=0.02)


def _qwen3(tiny_model: Path, sizes: Mapping[str, int]) -> Any:
    from transformers import AutoConfig, Qwen3Config

    tiny = AutoConfig.from_pretrained(tiny_model)
    return Qwen3Config(
        vocab_size=tiny.vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tiny.eos_token_id,
        **sizes,
    )


@pytest.fixture(scope="session")
def vllm_servers(tiny_model: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started by the first test that needs one."""
    yield from _ended(Servers(vllm(), {tiny_model: deep_model}, tmp_path_factory.mktemp("vllm")))


@pytest.fixture(scope="session")
def sglang_servers(tiny_model: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started by the first test that needs one."""
    yield from _ended(Servers(sglang(), {tiny_model: deep_model}, tmp_path_factory.mktemp("sglang")))


def _ended(servers: Servers) -> Iterator[Servers]:
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Path]:
    """Saves a small random model of any configuration, with the tokenizer of `tiny_model`."""

    def save(config: Any, noise: float = 0.1) -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1, which would hide a wrong one
                parameter.add_(torch.randn_like(parameter), alpha=noise)
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
        return directory

    return save
