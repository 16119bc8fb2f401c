"""The embedded engine."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.engines.base import EngineError, Memory
from stretto.engines.embedded.batch import Group, LiveBatch, Sample
from stretto.engines.embedded.control import StepControl
from stretto.engines.embedded.model import assign, build_module, checkpoint_tensors
from stretto.engines.embedded.sampling import Draws, draw, uniforms
from stretto.engines.inbox import Bounds, Inbox
from stretto.engines.inside.base import Inside
from stretto.engines.inside.receiver import enter
from stretto.engines.requests import check_requests
from stretto.engines.stopping import StopRule
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layout import Layout
from stretto.sync.layouts import replica_layout
from stretto.types import Completion, FinishReason, Request, Sampling, Version

_PREFILL_TOKENS = 8192
_IDLE_S = 0.1
"""Seconds between looks at whether the engine was closed while nothing is asked."""


class EmbeddedEngine:
    """Generates on one device with the weights it was given: the trainer's tensors, or buffers that a transport fills.

    Meets :class:`~stretto.engines.base.RolloutEngine`. `eos_ids` end every response; `max_length` bounds prompt +
    response tokens; `max_sequences` responses are generated at the same time, the others wait for a row. Its weights
    are of `dtype`; `replicas` engines like it, one a process, make up the layout.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        eos_ids: Sequence[int],
        max_length: int,
        max_sequences: int,
        map_file: str | None = None,
        replicas: int = 1,
    ):
        self._module: Any = build_module(directory)
        self._device, self._dtype = device, dtype
        self._layout = replica_layout(atoms_of(directory, map_file), dtype_name(dtype), replicas)
        self._max_length, self._max_sequences = max_length, max_sequences
        self._stop = StopRule(tokenizer, eos_ids)
        self._control = StepControl()
        self._ready = False

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Generate with these very tensors (by checkpoint name); who owns them may change their values while paused."""
        assign(self._module, weights, self._device)
        self._ready = True

    def allocate(self) -> Mapping[str, Tensor]:
        """Make buffers for the weights, at addresses that never change, for a transport to fill."""
        self.adopt(
            {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                for name, (shape, dtype) in self._layout.local(0).items()
            }
        )
        self._ready = False
        return self.weights()

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that generate, by checkpoint name."""
        return checkpoint_tensors(self._module)

    def layout(self) -> Layout:
        """See the contract."""
        return self._layout

    @property
    def version(self) -> Version:
        """See the contract."""
        return self._control.version

    def prepare(self, version: Version, timeout_s: float = 60.0) -> None:
        """See the contract."""
        self._control.prepare(version, timeout_s)

    def commit(self, version: Version) -> None:
        """See the contract."""
        self._control.commit(version)
        self._ready = True

    def cancel(self, version: Version) -> None:
        """See the contract."""
        self._control.cancel(version)

    def fail(self, version: Version) -> None:
        """See the contract."""
        self._control.fail(version)

    def pause(self, timeout_s: float = 60.0) -> None:
        """See the contract."""
        self._control.pause(timeout_s)

    def resume(self) -> None:
        """See the contract."""
        self._control.resume()

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """See the contract."""
        self._control.abort(None if request_ids is None else list(request_ids))

    def release_memory(self, *parts: Memory) -> None:
        """Keys and values live only while something is generated; what the allocator cached of them goes back here.

        Weights stay: they are the trainer's own, or few beside them.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reclaim_memory(self, *parts: Memory) -> None:
        """Nothing to do: memory is taken when a generation starts."""

    def enter(self, payload: str, timeout_s: float) -> None:
        """Receive weights, over the same way as a server's ranks, from the trainer that `payload` names.

        The caller's thread does; the trainer's own deadlines are in the payload.
        """
        enter(payload, Inside(self._module, 0, self._device, list, self._load))

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        weights = self.weights()
        for name, tensor in named:
            weights[name].copy_(tensor)

    def close(self) -> None:
        """See the contract."""
        self._control.close()

    def generate(self, requests: Sequence[Request], *, deadline_s: float) -> Iterator[Completion]:
        """See the contract."""
        self._check_ready()
        self._check(requests)
        if not requests:
            return iter(())
        batch = self._new_batch(Bounds.of(requests), sum(len(request.seeds) for request in requests), len(requests))
        return self._begin(self._generate(Inbox(requests, closed=True), batch, time.monotonic() + deadline_s))

    def serve(self, inbox: Inbox, bounds: Bounds) -> Iterator[Completion]:
        """See the contract."""
        self._check_ready()
        batch = self._new_batch(bounds, self._max_sequences, self._max_sequences)
        stream = self._begin(self._generate(inbox, batch, math.inf))
        inbox.open(self._check)
        return stream

    def _begin(self, stream: Generator[Completion]) -> Generator[Completion]:
        self._control.begin(stream)
        return stream

    def _check_ready(self) -> None:
        if not self._ready:
            raise EngineError("the engine has no weights yet: adopt the trainer's or allocate its own first")

    def _check(self, requests: Sequence[Request]) -> None:
        vocabulary = self._module.get_input_embeddings().weight.shape[0]
        check_requests(requests, vocabulary=vocabulary, max_length=self._max_length)

    def _generate(self, inbox: Inbox, batch: LiveBatch, deadline: float) -> Generator[Completion]:
        waiting = deque[Request]()
        while True:
            waiting.extend(inbox.take())
            yield from self._drop_aborted(batch, waiting)
            if not waiting and not batch.groups:
                if inbox.ended or self._control.closed:
                    return
                inbox.wait(_IDLE_S)
                continue
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(batch.samples)} samples were unfinished and {len(waiting)} prompts not begun at the "
                    "deadline (rollout.timeout_s)"
                )
            with self._control.step(deadline) as may_compute, torch.inference_mode():
                finished = self._advance(batch, waiting) if may_compute else []
            yield from finished

    def _advance(self, batch: LiveBatch, waiting: deque[Request]) -> list[Completion]:
        """Begin what there is room for, then one token for every live sample; returns what these tokens ended."""
        finished = self._admit(batch, waiting)
        if batch.samples:
            ids, positions, step = batch.decode_step()
            logits_NV = self._forward(ids, positions, step, 0)
            finished += self._extend(batch, list(batch.samples), logits_NV)
        return finished

    def _new_batch(self, bounds: Bounds, samples: int, groups: int) -> LiveBatch:
        """Room for at most so many samples and groups, whatever the engine has room for beside."""
        rows = min(self._max_sequences, samples)
        # Stragglers keep their group's prompt alive: room for twice the groups that fill the batch.
        group_rows = min(groups, 2 * -(-rows // bounds.samples) + 1)
        return LiveBatch(
            rows=rows,
            group_rows=group_rows,
            prompt_capacity=bounds.prompt,
            response_capacity=bounds.new,
            device=self._device,
        )

    def _forward(self, ids: Tensor, positions: Tensor, step: Any, rows: Tensor | int) -> Tensor:
        """Logits of the chosen rows, by the model's own head: some families scale or cap what `lm_head` gives."""
        return self._module(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows, stretto_step=step
        ).logits[0]

    def _admit(self, batch: LiveBatch, waiting: deque[Request]) -> list[Completion]:
        """Fill free rows: first with samples of groups already open, then with new groups, computing their prompts."""
        opened = batch.open_waiting(batch.groups)
        free = batch.rows - len(batch.samples)
        requests: list[Request] = []
        longest = 0
        while waiting and free > 0 and len(batch.groups) + len(requests) < batch.group_rows:
            longest = max(longest, len(waiting[0].prompt_ids))
            # Attention pads each prompt to the longest, so that is what the budget bounds.
            if requests and (len(requests) + 1) * longest > _PREFILL_TOKENS:
                break
            requests.append(waiting.popleft())
            free -= len(requests[-1].seeds)
        if requests:
            opened += self._prefill(batch, requests)
        if not opened:
            return []
        return self._extend(batch, opened, torch.stack([sample.group.first_logits_V for sample in opened]))

    def _prefill(self, batch: LiveBatch, requests: list[Request]) -> list[Sample]:
        ids, positions, last_G, step = batch.prefill_step(requests)
        logits_GV = self._forward(ids, positions, step, last_G)
        pairs = zip(requests, logits_GV, strict=True)
        return batch.open_waiting([batch.open_group(request, row_V, self.version) for request, row_V in pairs])

    def _extend(self, batch: LiveBatch, samples: list[Sample], logits_NV: Tensor) -> list[Completion]:
        """Draw one token for each sample; close and report those that it ends."""
        ids_N, logprobs_N = draw(logits_NV, self._draws(batch, samples))
        for sample, token, logprob in zip(samples, ids_N.tolist(), logprobs_N.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise EngineError(
                    f"the model gives no finite log-prob for token {len(sample.ids)} of request "
                    f"{sample.group.request.id} in version {self.version}: its weights or its activations overflowed"
                )
            # The first token's logits were computed with the prompt, maybe before the latest publication.
            sample.append(token, logprob, self.version if sample.ids else sample.group.version)
        finished = []
        for sample in samples:
            reason = self._stop.reason(sample.ids, sample.group.request.sampling)
            if reason is not None:
                finished.append(sample.completion(reason))
                batch.close_sample(sample)
        return finished

    def _draws(self, batch: LiveBatch, samples: list[Sample]) -> Draws:
        settings: list[Sampling] = [sample.group.request.sampling for sample in samples]
        temperature = np.array([one.temperature for one in settings])
        seeds = np.array([sample.seed for sample in samples], dtype=np.uint64)
        positions = np.array([len(sample.ids) for sample in samples])
        filters: dict[str, Tensor] = {}
        if any(one.top_p < 1 or one.top_k > 0 or one.min_p > 0 for one in settings):
            filters = {
                "top_p_N": batch.tensor([one.top_p for one in settings], torch.float64),
                "top_k_N": batch.tensor([one.top_k for one in settings]),
                "min_p_N": batch.tensor([one.min_p for one in settings], torch.float32),
            }
        return Draws(
            temperature_N=batch.tensor(np.where(temperature > 0, temperature, 1.0), torch.float32),
            greedy_N=batch.tensor(temperature == 0, torch.bool),
            uniform_N=batch.tensor(uniforms(seeds, positions), torch.float64),
            **filters,
        )

    def _drop_aborted(self, batch: LiveBatch, waiting: deque[Request]) -> list[Completion]:
        """Close what was aborted: live samples with what they have, waiting ones with nothing."""
        dropped = []
        for group in [group for group in batch.groups if self._control.is_aborted(group.request.id)]:
            dropped += [_untouched(group.request, index) for index in _unopened(group)]
            dropped += [sample.completion(FinishReason.ABORT) for sample in batch.close_group(group)]
        for request in [request for request in waiting if self._control.is_aborted(request.id)]:
            dropped += [_untouched(request, index) for index in range(len(request.seeds))]
            waiting.remove(request)
        return dropped


def _unopened(group: Group) -> range:
    return range(len(group.request.seeds) - group.waiting, len(group.request.seeds))


def _untouched(request: Request, index: int) -> Completion:
    return Completion(request.id, index, request.seeds[index], (), (), FinishReason.ABORT, ())
