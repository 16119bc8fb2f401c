"""SGLang's side: a custom weight loader that calls our receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stretto.engines.inside.base import Inside
from stretto.engines.inside.derived import derived
from stretto.engines.inside.receiver import enter as enter_receiver


def enter(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Named in `custom_weight_loader`; the only tensor is the payload's bytes."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

    payload = bytes(named_tensors[0][1].cpu().tolist()).decode()
    rank, device = get_tensor_model_parallel_rank(), next(model.parameters()).device
    enter_receiver(payload, Inside(model, rank, device, lambda: derived(model), model.load_weights))
