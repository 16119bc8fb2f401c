"""Loading a checkpoint: what does not fit is an error, and nothing random is left in the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from stretto.models import smollm2
from stretto.models.checkpoint import end_of_sequence_ids, load_model, load_tokenizer, longest_sequence, odd_layers


def changed(tiny_model: Path, directory: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the checkpoint with some tensors added or (None) taken out; dots in names are written as `__`."""
    shutil.copytree(tiny_model, directory)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model__norm__weight": None}, "missing_keys"),
        ({"model__layers__1__self_attn__q_proj__bias": torch.zeros(48)}, "unexpected_keys"),
    ],
)
def test_weights_that_are_missing_or_left_over_are_named(
    tiny_model: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        load_model(changed(tiny_model, tmp_path / "changed", **tensors), torch.float32)
    assert next(iter(tensors)).replace("__", ".") in str(error.value)


def test_a_model_of_fewer_layers_than_its_checkpoint_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = changed(tiny_model, tmp_path / "shallow")
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"model\.layers\.2"):
        load_model(directory, torch.float32)


def test_dropout_is_off_also_while_training(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=32, resid_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    model.train()
    ids = torch.arange(10)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"layer_types": ["full_attention"] * 2}, []),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        ({"sliding_window": 128}, ["sliding_window"]),
        ({"sliding_window": 128, "use_sliding_window": False}, []),
        ({"sliding_window": None}, []),
    ],
)
def test_layers_that_are_not_full_attention_are_found(settings: dict[str, object], found: list[str]) -> None:
    assert odd_layers(SimpleNamespace(**settings)) == found


def test_every_end_of_sequence_id_is_found(tiny_model: Path, tmp_path: Path) -> None:
    directory = changed(tiny_model, tmp_path / "ends")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert end_of_sequence_ids(directory, load_tokenizer(directory)) == (1, 7, 9)


def test_the_longest_sequence_is_the_smaller_of_the_models_and_the_limit() -> None:
    config = SimpleNamespace(max_position_embeddings=256)
    assert [longest_sequence(config, limit) for limit in (None, 100, 1000)] == [256, 100, 256]


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_convert", fails)
    with pytest.raises(OSError, match="No space left"):
        smollm2.smollm2_directory()
    assert list((tmp_path / "cache").iterdir()) == []
