"""The shapes that a forecast starts from, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from stretto.config.run import RunConfig
from stretto.data.batching import PACKED_ROW_TOKENS

PROCESS_BYTES = 400 * 2**20
"""Python with torch and transformers imported: 350 MiB of resident memory on CPU, and about as much for a CUDA
context."""


class Slabs(NamedTuple):
    """The engine's memory of keys and values: `group_rows` prompts and `rows` responses, in tokens each."""

    rows: int
    group_rows: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit, a layer."""
        return self.group_rows * self.prompt_tokens + self.rows * self.response_tokens


class Sizes(NamedTuple):
    """Prompts to train and to evaluate on, and the longest of either in tokens; counts are None when not read."""

    train: int | None
    heldout: int | None
    longest_train: int
    longest_heldout: int


class Cut(NamedTuple):
    """The trainer's largest micro-batch (rows x length tokens; `loss_tokens` have logits), and how many in a step."""

    rows: int
    length: int
    loss_tokens: int
    passes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process: `standing` lasts, while `rollout`, `training` and `update` are phases that take turns.

    `training` are the passes; `update` is the optimizer's step and the publication. It counts what lives at the same
    time. An allocator that keeps what was freed (glibc does so with arrays of up to 32 MiB) can make the process
    larger.
    """

    standing: dict[str, int]
    rollout: dict[str, int]
    training: dict[str, int]
    update: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The most that is there at the same time."""
        return max(self.generating, self.learning)

    @property
    def generating(self) -> int:
        """What is there while something is generated."""
        return sum(self.standing.values()) + sum(self.rollout.values())

    @property
    def learning(self) -> int:
        """The most that is there while the weights change."""
        return sum(self.standing.values()) + max(sum(self.training.values()), sum(self.update.values()))


@dataclass(frozen=True)
class ServerFootprint:
    """Bytes that a server takes on each of its devices.

    `weights` are the engine's copy, `wanted` the keys and values of all responses at their longest, `least` those of
    the longest one; `rest` is what else it takes. `pool` is what its own options give to keys and values, None when
    they say nothing. They say it as a share of the device that is for weights and pool, and for the rest too when
    `counts_rest`.
    """

    weights: int
    wanted: int
    least: int
    rest: int
    counts_rest: bool
    pool: int | None = None

    def share(self, pool: int, device_bytes: int) -> float:
        """The share of a device to ask for, so that `pool` bytes are left for keys and values."""
        return ceil(1e4 * (self.weights + pool + self.counts_rest * self.rest) / device_bytes) / 1e4


def slabs(groups: int, samples: int, prompt_tokens: int, response_tokens: int, max_sequences: int) -> Slabs:
    """The slabs of a phase of `groups` prompts with `samples` responses each, as the embedded engine sizes them."""
    rows = min(max_sequences, groups * samples)
    return Slabs(rows, min(groups, 2 * ceil(rows / samples) + 1), prompt_tokens, response_tokens)


def passes(config: RunConfig, groups: int, prompt_tokens: int) -> Cut:
    """How `stretto.data.batching.cut` cuts the optimizer steps of `groups` prompts, all responses at their longest."""
    samples, new, trainer = config.rollout.samples_per_prompt, config.rollout.max_new_tokens, config.trainer
    longest, members = prompt_tokens + new - 1, 1
    if trainer.packed:
        capacity = max(longest, min(PACKED_ROW_TOKENS, trainer.micro_batch_tokens))
        members = samples if new == 1 else min(samples, (capacity - prompt_tokens) // (new - 1))
    length = prompt_tokens + members * (new - 1)
    trees = ceil(groups / trainer.updates_per_batch) * ceil(samples / members)
    rows = min(trees, max(1, trainer.micro_batch_tokens // length))
    return Cut(rows, length, rows * members * new, ceil(trees / rows) * trainer.updates_per_batch)
