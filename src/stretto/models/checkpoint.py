"""Finding and loading a Hugging Face checkpoint: its names, shapes and dtypes are the coordinates of all weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stretto.models.smollm2 import smollm2_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_UNFILLED = ("missing_keys", "mismatched_keys", "unexpected_keys")


def resolve(model: str) -> Path:
    """Directory of the checkpoint `model`: a directory, `smollm2`, or a hub name (downloaded into the hub's cache).

    Raises ValueError that says what was looked for.
    """
    if model == "smollm2":
        return smollm2_directory()
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(
                f"model.path {directory} has no config.json: it is not a Hugging Face checkpoint directory"
            )
        return directory
    if directory.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ValueError(f"model.path {model} is not a directory")
    return _from_hub(model)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:
        raise ValueError(
            f"model.path {name} is neither a directory here nor to be had from the Hugging Face hub "
            f"({type(error).__name__}: {error}); give a checkpoint directory, a hub name or smollm2"
        ) from error


def load_config(directory: Path) -> PretrainedConfig:
    """The checkpoint's configuration. Raises ValueError when it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise ValueError(f"cannot read {directory / 'config.json'}: {type(error).__name__}: {error}") from error


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises ValueError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ValueError(f"cannot load a tokenizer from {directory}: {type(error).__name__}: {error}") from error


def load_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's causal language model on CPU in `dtype`. A missing or surplus weight is a ValueError."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded: Any = _model_class(load_config(directory)).from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except Exception as error:
        raise ValueError(f"cannot load the checkpoint {directory}: {type(error).__name__}: {error}") from error
    model, info = loaded
    wrong = {kind: sorted(map(str, info[kind])) for kind in _UNFILLED if info.get(kind)}
    if wrong:
        raise ValueError(f"the checkpoint {directory} does not fit its model: {json.dumps(wrong)[:1000]}")
    _switch_dropout_off(model)
    return model


def _switch_dropout_off(model: Any) -> None:
    """Dropout would make log-probs random: the ratio, the mismatch and a resumed run would no longer mean anything."""
    for holder in (model.config, *model.modules()):
        if isinstance(holder, torch.nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float):
                setattr(holder, name, 0.0)


def odd_layers(config: Any) -> list[str]:
    """Kinds of layers that are not plain full attention: a sliding window, linear attention, a recurrent state."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds:
        return sorted(kinds - {"full_attention"})
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return ["sliding_window"] if window else []


def empty_model(directory: Path) -> PreTrainedModel:
    """The model without memory for its weights (on the meta device)."""
    config = load_config(directory)
    with torch.device("meta"):
        return _model_class(config).from_config(config)


def _model_class(config: Any) -> Any:
    """Transformers' class that makes the model of a configuration: text alone where there is one, else with images."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def stored_dtype(directory: Path) -> str:
    """The dtype that the checkpoint says its weights have; float32 when it does not say."""
    settings = json.loads((directory / "config.json").read_text())
    return settings.get("dtype") or settings.get("torch_dtype") or "float32"


def end_of_sequence_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: those of generation_config.json, of config.json and the tokenizer's own."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        path = directory / file
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        ids.update([value] if isinstance(value, int) else value or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def longest_sequence(config: Any, limit: int | None) -> int:
    """Tokens that prompt + response may have: the model's positions, cut to `limit` (model.max_length) when given."""
    positions = getattr(config, "max_position_embeddings", None)
    return min(filter(None, (positions, limit)), default=2**31)
