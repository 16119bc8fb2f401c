"""Micro-batches through a pipeline of model chunks, by Megatron's schedules, ending in log-probs on the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from stretto.data.batching import MicroBatch, cut, filler
from stretto.sync.parallel import MegatronSizes
from stretto.trainers.groups import Groups
from stretto.trainers.megatron.logprobs import VocabShard, head_logprobs
from stretto.trainers.updates import Replicas
from stretto.types import Rollout

Consume = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""Takes a micro-batch, the log-probs [N] and entropies [N] of its loss tokens; gives the loss to go back from."""


def prepare(config: Any) -> None:
    """Set in Megatron's config what our schedules rely on; before anything is built on it.

    Losses and gradients are sums, here as everywhere (`calculate_per_token_loss` switches Megatron's averages off).
    Micro-batches are sorted by length, so each announces its shape to the next stage. At pp = 2, both neighbours of an
    interleaved stage are one rank, and one batch of sends would mix them up: hence not batched.
    """
    config.calculate_per_token_loss = True
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    config.overlap_p2p_comm, config.batch_p2p_comm = interleaved, not interleaved


class Passes:
    """Forward and backward passes of one model: `chunks` are this rank's, data-parallel or bare."""

    def __init__(
        self, chunks: Sequence[Any], sizes: MegatronSizes, groups: Groups, vocabulary: int, logit_chunk_tokens: int
    ):
        self._chunks, self._sizes, self._groups = list(chunks), sizes, groups
        self._models = [getattr(chunk, "module", chunk) for chunk in chunks]
        self._config: Any = self._models[0].config
        self._vocabulary, self._logit_chunk_tokens = vocabulary, logit_chunk_tokens

    def run(self, micro_batches: Sequence[MicroBatch], consume: Consume, *, backward: bool) -> None:
        """Pass all micro-batches through the pipeline; `consume` is called on the last stage, with each in turn.

        All ranks of a replica need the same micro-batches, and all replicas equally many (`cut_alike`). With `backward`
        the gradients are added up in the chunks' buffers, not yet exchanged between ranks.
        """
        schedule = get_forward_backward_func()
        with torch.set_grad_enabled(backward):
            schedule(
                forward_step_func=partial(self._forward, consume),
                data_iterator=[iter(micro_batches) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(micro_batches),
                seq_length=micro_batches[0].input_ids_BL.shape[1],
                micro_batch_size=len(micro_batches[0].input_ids_BL),
                forward_only=not backward,
            )

    def _forward(self, consume: Consume, batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
        """One chunk's part, as a schedule asks for it: the hidden states [L, B, D] and, for the last, how to go on."""
        micro = next(batches)
        model = getattr(chunk, "module", chunk)
        with _headless(model):
            hidden_LBD = chunk(micro.input_ids_BL, micro.position_ids_BL, None)
        return hidden_LBD, partial(self._finish, consume, model, micro)

    def _finish(self, consume: Consume, model: Any, micro: MicroBatch, hidden_LBD: Tensor) -> tuple[Any, ...]:
        if self._config.sequence_parallel:
            hidden_LBD = gather_from_sequence_parallel_region(hidden_LBD)
        else:
            hidden_LBD = copy_to_tensor_model_parallel_region(hidden_LBD)
        width = micro.input_ids_BL.shape[1]
        hidden_ND = hidden_LBD[micro.predict_N % width, micro.predict_N // width]
        head_VD = _head(model)
        shard = VocabShard.of(self._vocabulary, len(head_VD) * self._sizes.tp, self._groups.tensor)
        logprobs_N, entropies_N = head_logprobs(
            hidden_ND, head_VD, micro.target_N, micro.temperature_N, shard, self._logit_chunk_tokens
        )
        loss = consume(micro, logprobs_N, entropies_N)
        # Megatron divides by this count of tokens unless told that losses are sums, which `prepare` does.
        return loss, torch.ones((), dtype=torch.int, device=loss.device), {}

    def cut_alike(
        self, rollouts: Sequence[Rollout], indices: Sequence[int], micro_batch_tokens: int, replicas: Replicas
    ) -> list[MicroBatch]:
        """Micro-batches of this replica, filled up to the largest number on any replica; none when no replica has any.

        Experts of several replicas exchange tokens in every pass, so all make the same number. The interleaved schedule
        wants whole rounds of the pipeline. Rows are padded to a multiple of tp where ranks share a sequence.
        """
        parts = cut(rollouts, indices, batching="padded", micro_batch_tokens=micro_batch_tokens)
        passes = int(replicas.max([len(parts)])[0])
        if self._sizes.vpp > 1:
            passes = -(-passes // self._sizes.pp) * self._sizes.pp
        return self._ready(parts + [filler()] * (passes - len(parts)))

    def fillers(self) -> list[MicroBatch]:
        """The fewest micro-batches that a pipeline can pass, without any loss token."""
        return self._ready([filler()] * (self._sizes.pp if self._sizes.vpp > 1 else 1))

    def _ready(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        multiple = self._sizes.tp if self._config.sequence_parallel else 1
        return [pad_rows(part, multiple).to(self._groups.device) for part in parts]


def pad_rows(micro: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with rows of a length that `multiple` divides. What is added predicts nothing."""
    width = micro.input_ids_BL.shape[1]
    more = -width % multiple
    if not more:
        return micro
    wider = width + more
    rows, columns = micro.predict_N // width, micro.predict_N % width
    return replace(
        micro,
        input_ids_BL=pad(micro.input_ids_BL, (0, more)),
        position_ids_BL=torch.arange(wider).repeat(len(micro.input_ids_BL), 1),
        predict_N=rows * wider + columns,
    )


def _head(model: Any) -> Tensor:
    """This rank's rows of the output layer; with a tied head those of the embedding or, past stage 0, of its copy."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


@contextmanager
def _headless(model: Any) -> Iterator[None]:
    """Let the model return hidden states (after its last norm): its own head would make the logits of every token."""
    post_process, model.post_process = model.post_process, False
    try:
        yield
    finally:
        model.post_process = post_process
