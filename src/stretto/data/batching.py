"""Cutting a batch into micro-batches.

A row holds *trees*: a prompt followed by responses to it. A response attends to its prompt and to itself, and its
positions continue the prompt's, so every token sees exactly what it saw when it was sampled, while the prompt is
computed once for the whole group. ``padded`` batching is the case of one response a row, which needs no mask.

Only tokens that predict something are computed: the last token of a response is a target, never an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stretto.types import Rollout

# Attention within a row costs its length squared; beyond this many tokens that outweighs what sharing a prompt saves.
PACKED_ROW_TOKENS = 1024


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of B rows of L tokens with N loss tokens.

    `attention_BLL` says which token attends to which (None: causal). `predict_N` indexes the flattened [B * L] tokens
    whose output predicts `target_N`; `slot_N` is the loss token's place in the batch's flat arrays (`flat_tokens`).
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    attention_BLL: Tensor | None
    predict_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    slot_N: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items()
        }
        return MicroBatch(**moved)


@dataclass(frozen=True)
class _Tree:
    """A prompt and the (index, rollout) pairs that answer it."""

    prompt: tuple[int, ...]
    members: tuple[tuple[int, Rollout], ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(rollout.response_ids) - 1 for _, rollout in self.members)


def slot_offsets(rollouts: Sequence[Rollout]) -> list[int]:
    """Where each rollout's loss tokens begin in the batch's flat arrays; the last entry is their total."""
    offsets = [0]
    for rollout in rollouts:
        offsets.append(offsets[-1] + rollout.loss_tokens)
    return offsets


def cut(
    rollouts: Sequence[Rollout],
    indices: Iterable[int],
    *,
    batching: Literal["packed", "padded"],
    micro_batch_tokens: int,
) -> list[MicroBatch]:
    """Micro-batches of the chosen rollouts, none over `micro_batch_tokens` (unless one sample alone is)."""
    chosen = [(index, rollouts[index]) for index in indices if rollouts[index].loss_tokens]
    if not chosen:
        return []
    rows = _padded_rows(chosen) if batching == "padded" else _packed_rows(chosen, micro_batch_tokens)
    offsets = slot_offsets(rollouts)
    rows.sort(key=_row_length)
    return [_build(part, offsets, masked=batching == "packed") for part in _split(rows, micro_batch_tokens)]


def filler() -> MicroBatch:
    """A forward pass of one token and no loss, for a rank that has fewer micro-batches than another."""
    empty = torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        input_ids_BL=torch.zeros(1, 1, dtype=torch.long),
        position_ids_BL=torch.zeros(1, 1, dtype=torch.long),
        attention_BLL=None,
        predict_N=empty,
        target_N=empty,
        temperature_N=torch.zeros(0),
        slot_N=empty,
    )


def _padded_rows(chosen: Sequence[tuple[int, Rollout]]) -> list[list[_Tree]]:
    return [[_Tree(rollout.prompt_ids, ((index, rollout),))] for index, rollout in chosen]


def _packed_rows(chosen: Sequence[tuple[int, Rollout]], budget: int) -> list[list[_Tree]]:
    longest = max(len(rollout.prompt_ids) + len(rollout.response_ids) - 1 for _, rollout in chosen)
    capacity = max(longest, min(PACKED_ROW_TOKENS, budget))
    trees = sorted(_grow_trees(chosen, capacity), key=lambda tree: -tree.length)
    # No row is longer than the longest tree, so that padding and quadratic attention stay small: first fit, decreasing.
    limit = trees[0].length
    rows: list[list[_Tree]] = []
    room: list[int] = []
    for tree in trees:
        row = next((row for row, free in enumerate(room) if free >= tree.length), None)
        if row is None:
            rows.append([tree])
            room.append(limit - tree.length)
        else:
            rows[row].append(tree)
            room[row] -= tree.length
    return rows


def _grow_trees(chosen: Sequence[tuple[int, Rollout]], capacity: int) -> list[_Tree]:
    groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, Rollout]]] = {}
    for index, rollout in chosen:
        groups.setdefault((rollout.group_id, rollout.prompt_ids), []).append((index, rollout))
    trees = []
    for (_, prompt), members in groups.items():
        part, length = [], len(prompt)
        for index, rollout in members:
            if part and length + len(rollout.response_ids) - 1 > capacity:
                trees.append(_Tree(prompt, tuple(part)))
                part, length = [], len(prompt)
            part.append((index, rollout))
            length += len(rollout.response_ids) - 1
        trees.append(_Tree(prompt, tuple(part)))
    return trees


def _split(rows: Sequence[list[_Tree]], budget: int) -> list[list[list[_Tree]]]:
    """Consecutive rows (shortest first) while rows x longest stays within the budget."""
    parts: list[list[list[_Tree]]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * _row_length(row) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _row_length(row: Sequence[_Tree]) -> int:
    return sum(tree.length for tree in row)


class _Columns(NamedTuple):
    """The loss tokens of a micro-batch, as they are found."""

    predict: list[int]
    target: list[int]
    temperature: list[float]
    slot: list[int]


def _build(rows: Sequence[Sequence[_Tree]], offsets: Sequence[int], *, masked: bool) -> MicroBatch:
    width = max(_row_length(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.arange(width).repeat(len(rows), 1)
    # A token's tree, and its branch of it: 0 is the prompt, which every branch of the tree sees.
    tree_of = torch.full((len(rows), width), -1)
    branch_of = torch.zeros(len(rows), width, dtype=torch.long)
    columns = _Columns([], [], [], [])
    for number, row in enumerate(rows):
        start = 0
        for tree_number, tree in enumerate(row):
            place = slice(start, start + tree.length)
            tree_of[number, place] = tree_number
            _place(tree, ids[number, place], positions[number, place], branch_of[number, place])
            _add_loss_tokens(tree, number * width + start, offsets, columns)
            start += tree.length
    return MicroBatch(
        input_ids_BL=ids,
        position_ids_BL=positions,
        attention_BLL=_attention(tree_of, branch_of) if masked else None,
        predict_N=torch.tensor(columns.predict),
        target_N=torch.tensor(columns.target),
        temperature_N=torch.tensor(columns.temperature),
        slot_N=torch.tensor(columns.slot),
    )


def _place(tree: _Tree, ids: Tensor, positions: Tensor, branch_of: Tensor) -> None:
    """Write the inputs of a tree into its stretch of a row: the prompt, then one branch after the other."""
    at = len(tree.prompt)
    ids[:at] = torch.tensor(tree.prompt)
    positions[:at] = torch.arange(at)
    for branch, (_, rollout) in enumerate(tree.members, start=1):
        inputs = rollout.response_ids[:-1]
        place = slice(at, at + len(inputs))
        ids[place] = torch.tensor(inputs, dtype=torch.long)
        positions[place] = len(tree.prompt) + torch.arange(len(inputs))
        branch_of[place] = branch
        at += len(inputs)


def _add_loss_tokens(tree: _Tree, start: int, offsets: Sequence[int], columns: _Columns) -> None:
    """Add the loss tokens of a tree that begins at the flat place `start`."""
    last = start + len(tree.prompt) - 1
    branch = last + 1
    for index, rollout in tree.members:
        kept = [t for t, keep in enumerate(rollout.loss_mask_T) if keep]
        # The prompt's last token predicts every response's first one.
        columns.predict.extend(branch + t - 1 if t else last for t in kept)
        columns.target.extend(rollout.response_ids[t] for t in kept)
        columns.temperature.extend([rollout.temperature] * len(kept))
        columns.slot.extend(range(offsets[index], offsets[index] + len(kept)))
        branch += len(rollout.response_ids) - 1


def _attention(tree_BL: Tensor, branch_BL: Tensor) -> Tensor:
    """[B, L, L]: whether the token of row index attends to the token of column index."""
    same_tree = tree_BL[:, :, None] == tree_BL[:, None, :]
    visible = (branch_BL[:, None, :] == 0) | (branch_BL[:, :, None] == branch_BL[:, None, :])
    width = tree_BL.shape[1]
    return same_tree & visible & torch.ones(width, width, dtype=torch.bool).tril()
