"""What our code is given of an engine that it runs inside of."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Inside:
    """What an engine gives of one of its ranks.

    `derived` names tensors that the engine made from its parameters, which a direct write would leave behind; `load`
    takes whole tensors of the checkpoint through the engine's own loader.
    """

    model: nn.Module
    rank: int
    device: torch.device
    derived: Callable[[], list[str]]
    load: Callable[[Named], None]


def told(error: Exception) -> str:
    """The error being handled, as the trainer shows it."""
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
