"""What is being generated now: samples, their rows in the KV slabs, and the tensors of one forward pass.

Live rows are always ``0 .. n - 1``: a finished row is overwritten by the last one, so that no step computes a dead row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stretto.engines.embedded.kv import DecodeStep, PrefillStep, Slab
from stretto.types import Completion, FinishReason, Request, Version, VersionSpan


@dataclass(eq=False)
class Group:
    """A request with at least one live or waiting sample; `row` is its prompt's row in the slabs.

    `version` computed the prompt, and `first_logits_V` with it.
    """

    request: Request
    row: int
    first_logits_V: Tensor
    version: Version
    waiting: int
    live: int = 0


@dataclass(eq=False)
class Sample:
    """One response under way."""

    group: Group
    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def seed(self) -> int:
        """The sample's own seed."""
        return self.group.request.seeds[self.index]

    def append(self, token: int, logprob: float, version: Version) -> None:
        """Add a token that `version` sampled."""
        at = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = self.spans[-1]._replace(stop=at + 1)
        else:
            self.spans.append(VersionSpan(version, at, at + 1))

    def completion(self, reason: FinishReason) -> Completion:
        """What the contract reports."""
        return Completion(
            request_id=self.group.request.id,
            index=self.index,
            seed=self.seed,
            response_ids=tuple(self.ids),
            logprobs_T=tuple(self.logprobs),
            finish_reason=reason,
            version_spans=tuple(self.spans),
        )


class LiveBatch:
    """Groups and samples that hold rows. Not thread-safe: the engine calls it from its generating thread."""

    def __init__(self, rows: int, group_rows: int, prompt_capacity: int, response_capacity: int, device: torch.device):
        self.rows, self.group_rows = rows, group_rows
        self._prompt_capacity, self._response_capacity = prompt_capacity, response_capacity
        self._device = device
        self._prompts: dict[int, Slab] = {}
        self._responses: dict[int, Slab] = {}
        self.groups: list[Group] = []
        self.samples: list[Sample] = []

    def tensor(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype = torch.long) -> Tensor:
        """Host numbers on the engine's device."""
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self._device)

    def prefill_step(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor, PrefillStep]:
        """(ids [1, M], positions [1, M], index of each prompt's last token [G], attention) for new prompts."""
        lengths = np.array([len(request.prompt_ids) for request in requests])
        starts = np.cumsum(lengths) - lengths
        columns = np.arange(lengths.max())
        inside_GP = columns < lengths[:, None]
        gather_GP = np.where(inside_GP, starts[:, None] + columns, 0)
        step = PrefillStep(
            slabs=self._prompts,
            first_row=len(self.groups),
            gather_GP=self.tensor(gather_GP),
            scatter_M=self.tensor(np.flatnonzero(inside_GP)),
            rows=self.group_rows,
            capacity=self._prompt_capacity,
        )
        ids = self.tensor(np.concatenate([request.prompt_ids for request in requests]))
        positions = self.tensor(np.concatenate([np.arange(length) for length in lengths]))
        return ids[None], positions[None], self.tensor(starts + lengths - 1), step

    def decode_step(self) -> tuple[Tensor, Tensor, DecodeStep]:
        """(ids [1, N], positions [1, N], attention) for the newest token of every live sample."""
        groups = np.array([sample.group.row for sample in self.samples])
        own = np.array([len(sample.ids) - 1 for sample in self.samples])
        prompts = np.array([len(group.request.prompt_ids) for group in self.groups])
        member = np.zeros(len(groups), dtype=np.int64)
        seen = np.zeros(len(self.groups), dtype=np.int64)
        for row, group in enumerate(groups):
            member[row] = seen[group]
            seen[group] += 1
        gather_GM = np.zeros((len(self.groups), seen.max()), dtype=np.int64)
        gather_GM[groups, member] = np.arange(len(groups))
        width = prompts.max()
        exists_NL = np.concatenate(
            (np.arange(width) < prompts[groups][:, None], np.arange(own.max() + 1) <= own[:, None]), axis=1
        )
        step = DecodeStep(
            prompts=self._prompts,
            responses=self._responses,
            rows=self.rows,
            capacity=self._response_capacity,
            prompt_tokens=int(width),
            own_length_N=self.tensor(own),
            bias_NL=self.tensor(np.where(exists_NL, 0.0, -np.inf), torch.float32),
            group_N=self.tensor(groups),
            member_N=self.tensor(member),
            gather_GM=self.tensor(gather_GM),
        )
        ids = self.tensor([sample.ids[-1] for sample in self.samples])
        return ids[None], self.tensor(prompts[groups] + own)[None], step

    def open_group(self, request: Request, first_logits_V: Tensor, version: Version) -> Group:
        """Register a group whose prompt `prefill_step` just computed."""
        group = Group(request, len(self.groups), first_logits_V, version, waiting=len(request.seeds))
        self.groups.append(group)
        return group

    def open_waiting(self, groups: Sequence[Group]) -> list[Sample]:
        """Give rows to the groups' waiting samples, while there are free ones."""
        opened = []
        for group in groups:
            while group.waiting and len(self.samples) < self.rows:
                opened.append(Sample(group, index=len(group.request.seeds) - group.waiting))
                self.samples.append(opened[-1])
                group.waiting -= 1
                group.live += 1
        return opened

    def close_sample(self, sample: Sample) -> None:
        """Free the sample's row (and its group's, after the last one), moving the last row into its place.

        Between passes only: every live sample's tokens but its newest have keys and values.
        """
        row, last = self.samples.index(sample), self.samples[-1]
        if last is not sample:
            _move_all(self._responses, len(self.samples) - 1, row, len(last.ids) - 1)
            self.samples[row] = last
        self.samples.pop()
        sample.group.live -= 1
        if not sample.group.live and not sample.group.waiting:
            self._close_group(sample.group)

    def close_group(self, group: Group) -> list[Sample]:
        """Close all of the group, its waiting samples too; returns those that were live."""
        live = [sample for sample in self.samples if sample.group is group]
        group.waiting = 0
        for sample in live:
            self.close_sample(sample)
        if not live:
            self._close_group(group)
        return live

    def _close_group(self, group: Group) -> None:
        last = self.groups[-1]
        if last is not group:
            _move_all(self._prompts, last.row, group.row, len(last.request.prompt_ids))
            self.groups[group.row] = last
            last.row = group.row
        self.groups.pop()


@torch.inference_mode()
def _move_all(slabs: dict[int, Slab], source: int, target: int, tokens: int) -> None:
    for slab in slabs.values():
        slab.move(source, target, tokens)
