"""Samples on their way between processes, through TransferQueue's key-value interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from stretto.types import Rollout, Score

_TOKENS = {
    "prompt_ids": torch.int64,
    "response_ids": torch.int64,
    "logprobs_T": torch.float64,
    "loss_mask_T": torch.uint8,
}
_REST, _REWARD = "rest", "reward"
_SCORED = ("reward", "reward_parts")


def key_of(group_id: int, index: int) -> str:
    """The name of a sample on the bus."""
    return f"{group_id:012d}-{index:06d}"


class SampleBus:
    """The samples of one run, `partition`. Every process makes its own, once; TransferQueue has to be up.

    Token columns are tensors of their own; what is small travels as JSON, so that floats survive bit by bit.
    """

    def __init__(self, partition: str):
        import transfer_queue

        transfer_queue.init()  # here, since two threads that begin to use it at once would find it half made
        self._partition = partition

    def put(self, keys: Sequence[str], rollouts: Sequence[Rollout]) -> None:
        """Generated samples, not scored yet."""
        columns: dict[str, list[Tensor]] = {name: [] for name in (*_TOKENS, _REST)}
        for rollout in rollouts:
            rest = {name: value for name, value in asdict(rollout).items() if name not in (*_TOKENS, *_SCORED)}
            for name, dtype in _TOKENS.items():
                columns[name].append(torch.tensor(getattr(rollout, name), dtype=dtype))
            columns[_REST].append(_encoded(rest))
        self._put(keys, columns)

    def put_scores(self, keys: Sequence[str], scores: Sequence[Score]) -> None:
        """What the rewards said; no score is a failure."""
        rewards = [_encoded({"reward": score.reward, "reward_parts": dict(score.parts)}) for score in scores]
        self._put(keys, {_REWARD: rewards})

    def get(self, keys: Sequence[str], *, scored: bool = True) -> list[Rollout]:
        """The samples, in order. Raises ValueError when one is not there, or not `scored`."""
        import transfer_queue

        names = [*_TOKENS, _REST, *([_REWARD] if scored else [])]
        found = transfer_queue.kv_batch_get(keys=list(keys), partition_id=self._partition, select_fields=names)
        columns = {name: list(found[name].unbind()) for name in names}
        return [self._rollout({name: column[at] for name, column in columns.items()}) for at in range(len(keys))]

    def clear(self, keys: Sequence[str]) -> None:
        """The samples have ended."""
        import transfer_queue

        if keys:
            transfer_queue.kv_clear(keys=list(keys), partition_id=self._partition)

    def keys(self) -> set[str]:
        """What is on the bus."""
        import transfer_queue

        return set(transfer_queue.kv_list(self._partition).get(self._partition, {}))

    def _rollout(self, columns: dict[str, Tensor]) -> Rollout:
        tokens = {name: columns[name].tolist() for name in _TOKENS}
        reward = _decoded(columns[_REWARD]) if _REWARD in columns else {"reward": None, "reward_parts": {}}
        return Rollout.from_dict(_decoded(columns[_REST]) | tokens | reward)

    def _put(self, keys: Sequence[str], columns: dict[str, list[Tensor]]) -> None:
        import transfer_queue
        from tensordict import TensorDict

        ragged: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()
        }
        fields = TensorDict(ragged, batch_size=len(keys))
        transfer_queue.kv_batch_put(keys=list(keys), partition_id=self._partition, fields=fields)


def _encoded(value: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(column: Tensor) -> dict[str, Any]:
    return json.loads(bytes(column.tolist()))
