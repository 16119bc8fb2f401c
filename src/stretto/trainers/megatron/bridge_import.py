"""Importing Megatron-Bridge where Transformer Engine, Triton or CUDA is missing. With all three nothing is touched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stretto.models.scaffold.bridges import INSTALL, Bridges, installed_bridges

_NEEDED = ("omegaconf", "einops")

_WITHOUT = {
    "megatron.bridge.peft.lora": "transformer_engine",
    "megatron.bridge.peft.lora_layers": "transformer_engine",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": "triton",
}
"""Modules that Megatron-Bridge imports for adapters and for Mamba, and what each cannot be imported without."""


class _Placeholder(ModuleType):
    """A module in which every name is an empty class: enough to be imported from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def require_bridge() -> Bridges:
    """The architectures of the installed Megatron-Bridge; nothing is imported.

    Raises ValueError that says what to install when it, or something that it imports, is missing.
    """
    found = installed_bridges()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if found is None or missing:
        what = "Megatron-Bridge" if found is None else ", ".join(missing)
        raise ValueError(
            f"trainer.names = \"bridge\" needs {what}: pip install 'stretto[megatron]' and then {INSTALL} "
            '(its own requirements need a GPU), or set trainer.names = "raw"'
        )
    return found


@cache
def import_bridge() -> Any:
    """Megatron-Bridge's `AutoBridge`. Raises ValueError when it cannot be imported."""
    # First, as it is: what Megatron-Core finds out about its surroundings must not come from placeholders.
    import megatron.core.models.gpt  # noqa: F401

    try:
        with _placeholders():
            from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ValueError(
            f'Megatron-Bridge cannot be imported ({error}); install what it lacks, or set trainer.names = "raw"'
        ) from error
    if not torch.cuda.is_available():
        _mend_scatter()
    return AutoBridge


def _mend_scatter() -> None:
    """Have Megatron-Bridge scatter parts that lie together in memory.

    Columns of a matrix do not. On the way to a GPU they are copied, and then do; gloo would send what lies behind them.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_whole(mapping: Any, splits: list[Tensor] | None, *args: Any, **kwargs: Any) -> Any:
        return scatter(mapping, splits and [one.contiguous() for one in splits], *args, **kwargs)

    MegatronParamMapping.scatter_to_tp_ranks = scatter_whole  # type: ignore[reportAttributeAccessIssue]


@contextmanager
def _placeholders() -> Iterator[None]:
    """Placeholders for the modules that cannot be imported here, as long as the context lasts."""
    names = [name for name, need in _WITHOUT.items() if name not in sys.modules and find_spec(need) is None]
    sys.modules.update({name: _Placeholder(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
