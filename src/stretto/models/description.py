"""What a configuration alone says about a model: its tensors in memory and in files. No weights are there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Tensor(NamedTuple):
    """Shape and dtype of a tensor, in a model that is asked to be bfloat16."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Description:
    """A model as transformers builds it (`memory`) and writes it (`files`); tied tensors are there once."""

    config: Any
    architecture: str
    memory: dict[str, Tensor]
    files: dict[str, Tensor]
    tied: dict[str, str]
    """Names in memory of tensors that are another's: the head that is the embedding."""
    centred: frozenset[str]
    """Weights of norms that are centred at zero: the norm multiplies by 1 + the weight."""
    transposed: frozenset[str]
    """Weights with their inputs as rows (GPT-2's), not as columns."""


def read_config(model: str) -> Any:
    """transformers' configuration of a checkpoint directory, a config.json, `smollm2` or a hub name.

    Of a hub name only the configuration is fetched. Raises ValueError for what cannot be read.
    """
    from transformers import AutoConfig

    if model == "smollm2":
        from stretto.models.smollm2 import smollm2_directory

        model = str(smollm2_directory())
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: it is not a Hugging Face checkpoint directory")
    if not path.exists() and (
        path.is_absolute() or model.startswith(".") or path.suffix == ".json" or model.count("/") > 1
    ):
        raise ValueError(f"{path} is neither a checkpoint directory nor a config.json")
    try:
        return AutoConfig.from_pretrained(path if path.exists() else model)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ValueError(f"cannot read the configuration of {model}: {type(error).__name__}: {said[0]}") from error


def describe(config: Any) -> Description:
    """Build the model on the meta device and look at it. Raises ValueError when transformers cannot."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    try:
        with torch.device("meta"), _quiet():
            model = auto.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        raise ValueError(
            f"transformers cannot build a language model of {type(config).__name__}: "
            f"{type(error).__name__}: {str(error).strip()[:300]}"
        ) from error
    every = model.state_dict()
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {name: one for name, one in every.items() if name in own}
    written = _written(model, held)
    ordered = {name: written[name] for name in (*(name for name in held if name in written), *written)}
    first = {id(one): name for name, one in own.items()}
    everywhere = dict(model.named_parameters(remove_duplicate=False))
    tied = {name: first[id(one)] for name, one in everywhere.items() if name not in own}
    transposed = (f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D")
    return Description(
        config=config,
        architecture=type(model).__name__,
        memory=_tensors(held),
        files=_tensors(ordered),
        tied=tied,
        centred=frozenset(_centred(model)),
        transposed=frozenset(transposed),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns about token ids beyond a small vocabulary, which a description does not use."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _tensors(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: Tensor(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}


def _written(model: Any, held: dict[str, Any]) -> dict[str, Any]:
    """The tensors that saving the model writes: some families have other names, and experts apart, in files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(held))


def _centred(model: nn.Module) -> Iterator[str]:
    """Names of norm weights that act as 1 + weight, found by giving each kind of norm a weight of zeros."""
    known: dict[type, bool] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or weight is None or weight.ndim != 1:
            continue
        if type(module) not in known:
            known[type(module)] = _passes_with_zeros(module)
        if known[type(module)]:
            yield f"{name}.weight"


def _passes_with_zeros(norm: Any) -> bool:
    import torch

    trial = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.zero_()
        try:
            return bool(trial(torch.arange(1.0, trial.weight.numel() + 1)[None]).abs().max() > 0)
        except Exception:  # a norm that takes more than its input is one that nobody knows anything about
            return False
