"""What a check trusts: transformers' own model, which knows nothing of weight maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.models.checkpoint import load_model
from stretto.orchestration.check.probe import quiet
from stretto.types import Batch, Rollout


class Reference:
    """transformers' model of a checkpoint in `dtype`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device):
        with quiet():
            loaded: Any = load_model(directory, dtype)
        self._model: Any = loaded.to(device).eval()
        self._device = device

    @torch.no_grad()
    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """Log-probs of every response token at its rollout's temperature: whole logits, no padding, no packing."""
        found: list[tuple[float, ...]] = [()] * len(rollouts)
        for indices in _by_length(rollouts):
            rows = self._logprobs([rollouts[index] for index in indices])
            for index, row in zip(indices, rows, strict=True):
                found[index] = tuple(row.tolist())
        return found

    def _logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        """[B, T] of rollouts with equally long prompts and responses."""
        ids_BL = torch.tensor([[*one.prompt_ids, *one.response_ids] for one in rollouts], device=self._device)
        temperature_B = torch.tensor([one.temperature for one in rollouts], device=self._device)
        logits_BLV = self._model(input_ids=ids_BL, use_cache=False).logits.float() / temperature_B[:, None, None]
        start = len(rollouts[0].prompt_ids)
        logprobs_BTV = logits_BLV[:, start - 1 : -1].log_softmax(-1)
        return logprobs_BTV.gather(-1, ids_BL[:, start:, None])[..., 0]

    def write_gradient(self, batch: Batch, directory: Path) -> None:
        """Write the gradient of the policy loss as if it were the model's weights, under their names on disk.

        The model is used up.
        """
        tokens = sum(len(one.response_ids) for one in batch.rollouts)
        for indices in _by_length(batch.rollouts):
            logprobs_BT = self._logprobs([batch.rollouts[index] for index in indices])
            advantage_B = torch.tensor([batch.advantages[index] for index in indices], device=self._device)
            (-(logprobs_BT * advantage_B[:, None]).sum() / tokens).backward()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                parameter.grad = None
            for name in set(self._model.state_dict()) & set(dict(self._model.named_buffers())):
                self._model.get_buffer(name).zero_()
        with quiet():
            self._model.float().save_pretrained(directory)


def _by_length(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Indices of rollouts that can be stacked."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, one in enumerate(rollouts):
        groups[len(one.prompt_ids), len(one.response_ids)].append(index)
    return list(groups.values())


def held_tensors(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What transformers holds in memory of the checkpoint in `directory`, loaded in `dtype`; tied tensors once."""
    with quiet():
        model: Any = load_model(directory, dtype)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
