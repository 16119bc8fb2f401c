"""Importing Megatron-Bridge where Transformer Engine and Triton are missing. With both nothing is touched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

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
    return AutoBridge


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
