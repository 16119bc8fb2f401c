"""The engine's module: transformers' own model, with the attention of `kv.py` in the place of its attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.models.checkpoint import empty_model, odd_layers
from stretto.sync.coverage import differences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "stretto_embedded"


def build_module(directory: Path) -> PreTrainedModel:
    """The checkpoint's model on the meta device, ready to be given weights. ValueError when it cannot be embedded."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    module = empty_model(directory)
    _check_supported(module.config)
    module.config._attn_implementation = ATTENTION
    return module.eval().requires_grad_(False)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    layer: Any = module.layer_idx
    return options["stretto_step"].attend(layer, query, key, value, options["scaling"]), None


def _check_supported(config: Any) -> None:
    """Layers with a window or a state need caches of their own, which this engine does not have."""
    if odd := odd_layers(config):
        raise ValueError(
            f"the embedded engine serves full-attention models; {config.model_type} has {', '.join(odd)}. "
            "Such a model needs the SGLang or the vLLM engine"
        )


def checkpoint_tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that a publication fills, by checkpoint name: tied copies are left out."""
    tied = set(getattr(module, "all_tied_weights_keys", None) or {})
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in tied}


def assign(module: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Make `weights` (by checkpoint name) the module's own tensors, uncopied, and build its buffers on `device`."""
    names = set(checkpoint_tensors(module))
    if lines := [
        *differences("the model has", sorted(names - set(weights)), weights),
        *differences("the model does not have", sorted(set(weights) - names), names),
    ]:
        raise ValueError("the weights do not fit the engine's model:\n  " + "\n  ".join(lines))
    module.load_state_dict({name: tensor.detach() for name, tensor in weights.items()}, assign=True, strict=False)
    module.tie_weights()
    _build_buffers(module, device)
    left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    assert not left, f"tensors without values: {left}"
    module.requires_grad_(False)


def _build_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Buffers outside the checkpoint (rotary frequencies) are functions of the config: transformers fills them."""
    for child in module.modules():
        missing = [name for name, buffer in child.named_buffers(recurse=False) if buffer.is_meta]
        for name in missing:
            child.register_buffer(name, torch.empty_like(child.get_buffer(name), device=device), persistent=False)
        if missing:
            with _others_aside(child, missing):
                module._init_weights(child)


@contextmanager
def _others_aside(child: nn.Module, missing: Sequence[str]) -> Iterator[None]:
    """Without the weights and buffers that have values: transformers would initialise those of this module too."""
    held: list[tuple[Any, str, Any]] = [
        (table, name, tensor)
        for table in (child._parameters, child._buffers)
        for name, tensor in table.items()
        if tensor is not None and name not in missing
    ]
    for table, name, tensor in held:
        empty = tensor.detach().to("meta")
        table[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    try:
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor
