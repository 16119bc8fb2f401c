"""What a model keeps per token, found by running its layers where tensors have no memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOKENS = 64


class Probe:
    """Runs the layers of a model on the meta device in the dtype `compute`, and counts its elements for each token.

    What is kept in a wider dtype, as norms do it, counts as several.

    `kv_values`: keys and values of all layers. `saved_values`: what the layers keep for the backward pass, when
    attention keeps its inputs and its output (Dao et al. 2022, FlashAttention, arXiv:2205.14135, section 3.1);
    `stream_values` of them are as wide as the hidden states between the layers. `repeat`: keys and values are repeated
    for every query head, as transformers does under a mask.
    """

    def __init__(self, module: Any, compute: torch.dtype, *, repeat: bool):
        self.kv_values = 0
        self.layers = 0
        self._repeat = repeat
        text = module.config.get_text_config()
        self.hidden, self.vocabulary = text.hidden_size, text.vocab_size
        saved = self._run(module.to(compute))
        stream = [tensor for tensor in saved if tensor.ndim < 4 and tensor.shape[-1:] == (self.hidden,)]
        self.saved_values, self.stream_values = (
            ceil(sum(tensor.untyped_storage().nbytes() for tensor in part) / compute.itemsize / _TOKENS)
            for part in (saved, stream)
        )

    def _run(self, module: Any) -> list[Tensor]:
        """The tensors that a forward pass keeps, each memory once, as what keeps it first sees it."""
        weights = {_storage(parameter) for parameter in module.parameters()}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in weights:
                saved.setdefault(_storage(tensor), tensor)
            return tensor

        module.requires_grad_(True)
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        with _saving(keep), _GroupedProducts():
            module.base_model(input_ids=ids, position_ids=ids, use_cache=False, stretto_step=self)
        return list(saved.values())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """In the place of the engine's attention: [1, heads, tokens, size] -> [1, tokens, query heads, size]."""
        self.layers += 1
        self.kv_values += key.shape[1] * (key.shape[3] + value.shape[3])
        if self._repeat:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return _Attention.apply(query, key, value)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Keeps its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, out)
        return out


class _GroupedProduct(torch.autograd.Function):
    """Keeps its input: [rows, in] by experts' [experts, in, out] -> [rows, out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.new_empty(len(rows), experts.shape[-1])


class _GroupedProducts(TorchFunctionMode):
    """Experts' products in every dtype: on the meta device torch has those of bfloat16 alone."""

    _NAMES = ("grouped_mm", "_grouped_mm")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in self._NAMES:
            return _GroupedProduct.apply(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _saving(keep: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
