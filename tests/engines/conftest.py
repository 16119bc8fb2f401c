"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ENGINES, Factory


@pytest.fixture(params=ENGINES)
def serve(request: pytest.FixtureRequest) -> Factory:
    """Each engine in turn: `serve(model_directory, max_sequences=..., eos_ids=...)`."""
    return ENGINES[request.param]


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
