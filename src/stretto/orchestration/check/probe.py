"""The model that a check runs on: the user's own when it is small, else a wide one with few layers, random weights."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.memory import available_memory
from stretto.models.checkpoint import resolve
from stretto.models.description import read_config

WHOLE_PARAMETERS = 500_000_000
"""A checkpoint of at most so many parameters is checked whole, with its own weights."""
_COPIES = 9
"""float32 copies of the weights that live at the same time: the trainer's four, the engine's, transformers' with its
gradient, what is read back, and what a difference is looked for in."""
_LAYER = re.compile(r"\blayers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Probe:
    """A checkpoint directory; `says` is how it came to be."""

    directory: Path
    says: str
    parameters: int


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, which are about running a model and not about checking one."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def make_probe(model: str, work: Path, *, dtype: str, layers: int, stages: int) -> Probe:
    """The probe of `model`, below `work` when it has to be made.

    `layers` overrides how many it has (0: enough for every kind of layer and for `stages`). Raises ValueError when the
    model cannot be read, or its probe does not fit into memory.
    """
    with quiet():
        config = read_config(model)
        if stages > (of := config.get_text_config().num_hidden_layers):
            raise ValueError(f"{stages} pipeline stages (pp x vpp) are more than the {of} layers of {model}")
        own = _with_weights(model)
        if own is not None and not layers and (count := _count(config)) <= WHOLE_PARAMETERS:
            _check_memory(count, model)
            return Probe(own, f"the checkpoint itself: {count:,} parameters, its own weights", count)
        config, kept, of = cut(config, layers, stages)
        count = _count(config)
        _check_memory(count, model)
        directory = work / "probe"
        write_random(config, directory, getattr(torch, dtype))
    return Probe(directory, f"full width, {kept} of {of} layers, random weights: {count:,} parameters", count)


def _with_weights(model: str) -> Path | None:
    """The directory of a checkpoint whose weights are here."""
    path = resolve(model) if model == "smollm2" else Path(model).expanduser()
    return path if path.is_dir() and any(path.glob("*.safetensors")) else None


def _count(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _build(config, torch.float32).parameters())


def _check_memory(parameters: int, model: str) -> None:
    need, free = _COPIES * 4 * parameters, available_memory()
    if free is not None and need > free:
        raise ValueError(
            f"a probe of {model} takes about {need / 1e9:.0f} GB of memory and {free / 1e9:.0f} GB are free; "
            "give --layers a smaller number, or check on a larger machine"
        )


def _build(config: Any, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    return kind.from_config(config, dtype=dtype)


def cut(config: Any, layers: int, stages: int) -> tuple[Any, int, int]:
    """The configuration with its first layers alone; how many those are, and of how many.

    As many as it takes to have every kind of layer, and one for each of `stages`; at least two.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    of = text.num_hidden_layers
    kept = layers or min(of, max(2, stages, _last_new_kind(config, text) + 1))
    if not stages <= kept <= of:
        raise ValueError(f"--layers {kept} must be at least the {stages} pipeline stages and at most the model's {of}")
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == of and name.startswith(("layer", "no_rope")):
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    return config, kept, of


def _last_new_kind(config: Any, text: Any) -> int:
    """The first layer by which every kind of layer has occurred."""
    with torch.device("meta"):
        model = _build(config, torch.float32)
    parts: dict[int, set[Any]] = {n: set() for n in range(text.num_hidden_layers)}
    for name, tensor in model.state_dict().items():
        if (found := _LAYER.search(name)) and int(found[1]) in parts:
            parts[int(found[1])].add((found[2], tuple(tensor.shape)))
    for n, kind in enumerate(getattr(text, "layer_types", None) or ()):
        parts[n].add(kind)
    first: dict[frozenset[Any], int] = {}
    for n, kind in parts.items():
        first.setdefault(frozenset(kind), n)
    return max(first.values())


def write_random(config: Any, directory: Path, dtype: torch.dtype) -> None:
    """transformers' model of `config` with random weights, as transformers writes it."""
    torch.manual_seed(0)
    model = _build(config, dtype)
    with torch.no_grad():
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in model.state_dict():
            if name in named:
                named[name].copy_(random_values(name, named[name]))
        model.tie_weights()
    model.save_pretrained(directory)


def random_values(name: str, tensor: Tensor) -> Tensor:
    """Values that no other tensor has, of a size that keeps activations near 1.

    Vectors get noise around what they are initialised with: 1, or 0, where they are neutral. They are multiples of a
    power of two for which adding 1 is exact in the tensor's dtype, so that every round trip has to be bitwise.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.ndim < 2:
        values = tensor.detach().float().cpu() + (0.25 * noise).clamp(-0.9, 0.9)
        step = 2.0**-16 if tensor.dtype == torch.float32 else 2.0**-6
        return (values / step).round() * step
    return noise * tensor.shape[-1] ** -0.5
