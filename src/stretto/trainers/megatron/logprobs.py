"""Log-probs and entropies from logits that stay cut over the vocabulary: only numbers per token are exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint


class VocabShard(NamedTuple):
    """The rows of the head that this rank holds, among the ranks of `group`: token ids `start <= id < stop`.

    `stop` ends before the padding of the vocabulary; rows of the head beyond it are never read. A `group` of None (or
    of one rank) has the whole vocabulary here.
    """

    start: int
    stop: int
    group: Any = None

    @classmethod
    def of(cls, vocabulary: int, padded: int, group: Any) -> VocabShard:
        """This rank's share of `vocabulary` ids, when `padded` rows are cut evenly over the ranks of `group`."""
        ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        rows = padded // ranks
        assert rows * ranks == padded, f"{padded} rows do not divide over {ranks} ranks"
        start = rank * rows
        return cls(start, max(start, min(start + rows, vocabulary)), group)

    def reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Over the ranks of the vocabulary, in place."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def head_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature_N: Tensor, shard: VocabShard, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] of the targets at their temperature, and entropies [N] of those distributions, in nats.

    `head_VD` are this rank's rows of the output layer, padding included. The gradient that reaches `hidden_ND` is this
    rank's part: it must still be summed over the ranks of the vocabulary. Of `chunk_tokens` tokens at a time the logits
    exist; with more tokens than that they are computed again in the backward pass.
    """
    if shard.stop - shard.start < len(head_VD):
        head_VD = head_VD[: shard.stop - shard.start]
    parts = [
        _chunk(
            hidden_ND[i : i + chunk_tokens],
            head_VD,
            target_N[i : i + chunk_tokens],
            temperature_N[i : i + chunk_tokens],
            shard,
            recompute=torch.is_grad_enabled() and len(hidden_ND) > chunk_tokens,
        )
        for i in range(0, max(1, len(hidden_ND)), chunk_tokens)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature_N: Tensor, shard: VocabShard, *, recompute: bool
) -> tuple[Tensor, Tensor]:
    inputs = (hidden_ND, head_VD, target_N, temperature_N, shard)
    if recompute:
        # Every rank of the vocabulary runs the same backward pass, so the sums meet again when they are computed again.
        return checkpoint(_from_hidden, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
    return _from_hidden(*inputs)


def _from_hidden(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature_N: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    logits_NV = linear(hidden_ND, head_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature_N[:, None]
    return vocab_parallel_logprobs(logits_NV, target_N, shard)


def vocab_parallel_logprobs(logits_NV: Tensor, target_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """``log_softmax(logits)[target]`` [N] and the entropies [N], from this rank's columns [N, stop - start] alone.

    The gradient of the columns is exact and needs no exchange. A rank may hold no column at all.
    """
    return _VocabParallel.apply(logits_NV, target_N, shard)  # type: ignore[return-value]


class _VocabParallel(torch.autograd.Function):
    """With p = softmax(z): d log p_t / dz_j = [j = t] - p_j, and dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
        highest_N = logits_NV.new_full((len(logits_NV),), -torch.inf)
        if logits_NV.shape[1]:
            highest_N = logits_NV.amax(-1)
        shard.reduce(highest_N, dist.ReduceOp.MAX)
        shifted_NV = logits_NV - highest_N[:, None]
        exponentials_NV = shifted_NV.exp()
        here_N = (target_N >= shard.start) & (target_N < shard.stop)
        place_N = torch.where(here_N, target_N - shard.start, 0)
        chosen_N = shifted_NV.new_zeros(len(shifted_NV))
        if logits_NV.shape[1]:
            chosen_N = torch.where(here_N, shifted_NV.gather(-1, place_N[:, None])[:, 0], 0)
        sums_3N = torch.stack([exponentials_NV.sum(-1), (exponentials_NV * shifted_NV).sum(-1), chosen_N])
        total_N, weighted_N, chosen_N = shard.reduce(sums_3N)
        entropies_N = total_N.log() - weighted_N / total_N
        probabilities_NV = exponentials_NV.div_(total_N[:, None])
        ctx.save_for_backward(probabilities_NV, entropies_N, here_N, place_N)
        ctx.set_materialize_grads(False)
        return chosen_N - total_N.log(), entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        by_logprob_N, by_entropy_N = gradients
        probabilities_NV, entropies_N, here_N, place_N = ctx.saved_tensors
        gradient_NV = None
        if by_logprob_N is not None:
            gradient_NV = probabilities_NV * -by_logprob_N[:, None]
            if gradient_NV.shape[1]:
                gradient_NV.scatter_add_(-1, place_N[:, None], torch.where(here_N, by_logprob_N, 0)[:, None])
        if by_entropy_N is not None:
            # xlogy is 0 where a probability has underflowed to 0.
            surprise_NV = torch.xlogy(probabilities_NV, probabilities_NV) + probabilities_NV * entropies_N[:, None]
            part_NV = surprise_NV * -by_entropy_N[:, None]
            gradient_NV = part_NV if gradient_NV is None else gradient_NV.add_(part_NV)
        return gradient_NV, None, None
