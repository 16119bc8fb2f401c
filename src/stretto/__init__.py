"""Stretto post-trains language models with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.config import RunConfig

__version__ = "0.1.0"
__all__ = ["train"]


def train(config: RunConfig, **options: Any) -> Any:
    """Run `config` to its end and return its :class:`~stretto.orchestration.colocate.RunResult`.

    The same as `stretto train`; `options` are `resume` and `replay` (paths). Raises ValueError for what the
    configuration or its files have wrong.
    """
    from stretto.orchestration.launch import train as launch

    return launch(config, **options)
