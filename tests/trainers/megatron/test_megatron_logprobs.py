"""Log-probs of a vocabulary cut over ranks, against a plain log-softmax in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import Ranks
from stretto.trainers.megatron.logprobs import VocabShard, head_logprobs, vocab_parallel_logprobs
from stretto.world import World

TOKENS, WIDTH = 13, 6


class Case(NamedTuple):
    """A head of `padded` rows, whose rows beyond `vocabulary` are padding, and what is asked of it."""

    hidden_ND: Tensor
    head_VD: Tensor
    target_N: Tensor
    temperature_N: Tensor
    vocabulary: int


def case(vocabulary: int, padded: int, scale: float = 1.0, tokens: int = TOKENS) -> Case:
    draw = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64) * scale
    head = torch.randn(padded, WIDTH, generator=draw, dtype=torch.float64)
    target = torch.randint(vocabulary, (tokens,), generator=draw)
    temperature = torch.rand(tokens, generator=draw, dtype=torch.float64) + 0.5
    return Case(hidden, head, target, temperature, vocabulary)


def plain(one: Case) -> list[Tensor]:
    """Log-probs, entropies, and what a loss of both has for gradients of the hidden states and of the head."""
    hidden, head = one.hidden_ND.clone().requires_grad_(), one.head_VD.clone().requires_grad_()
    logits = (hidden @ head[: one.vocabulary].T) / one.temperature_N[:, None]
    logprobs_NV = logits.log_softmax(-1)
    logprobs = logprobs_NV.gather(-1, one.target_N[:, None])[:, 0]
    entropies = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    loss(logprobs, entropies).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return [logprobs.detach(), entropies.detach(), hidden.grad, head.grad]


def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    return (weights * logprobs).sum() - 0.3 * (weights.flip(0) * entropies).sum()


def found(one: Case, group: object, chunk_tokens: int) -> list[Tensor]:
    """The same from this rank's rows; the gradients put together over ranks."""
    shard = VocabShard.of(one.vocabulary, len(one.head_VD), group)
    rows = len(one.head_VD) // (dist.get_world_size(group) if group else 1)  # type: ignore[arg-type]
    hidden = one.hidden_ND.clone().requires_grad_()
    head = one.head_VD[shard.start : shard.start + rows].clone().requires_grad_()
    logprobs, entropies = head_logprobs(hidden, head, one.target_N, one.temperature_N, shard, chunk_tokens)
    loss(logprobs, entropies).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    whole = one.head_VD.new_zeros(one.head_VD.shape)
    whole[shard.start : shard.start + rows] = head.grad
    return [logprobs.detach(), entropies.detach(), shard.reduce(hidden.grad), shard.reduce(whole)]


@pytest.mark.parametrize("chunk_tokens", [5, 100])
@pytest.mark.parametrize(("vocabulary", "padded"), [(16, 16), (11, 16)])
def test_one_rank_is_plain_log_softmax(vocabulary: int, padded: int, chunk_tokens: int) -> None:
    one = case(vocabulary, padded)
    for expected, mine in zip(plain(one), found(one, None, chunk_tokens), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)


# The last: the second rank holds nothing but padding.
@pytest.mark.parametrize(("vocabulary", "padded"), [(16, 16), (11, 16), (7, 16)])
def test_two_ranks_are_plain_log_softmax(pair: Ranks, vocabulary: int, padded: int) -> None:
    expected = plain(case(vocabulary, padded))
    for chunk_tokens in (5, 100):
        for results in pair.run(on_two_ranks, vocabulary, padded, chunk_tokens):
            for mine, right in zip(results, expected, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-13)


def on_two_ranks(world: World, vocabulary: int, padded: int, chunk_tokens: int) -> list[Tensor]:
    return found(case(vocabulary, padded), dist.group.WORLD, chunk_tokens)


def test_no_token_still_has_a_graph() -> None:
    mine = found(case(11, 16, tokens=0), None, 8)
    assert [tensor.shape for tensor in mine] == [(0,), (0,), (0, WIDTH), (16, WIDTH)]
    assert not mine[3].any()


def test_padding_rows_get_no_gradient_and_are_never_read() -> None:
    one = case(11, 16)
    poisoned = one._replace(head_VD=one.head_VD.clone())
    poisoned.head_VD[11:] = torch.nan
    for clean, other in zip(found(one, None, 100), found(poisoned, None, 100), strict=True):
        assert torch.equal(clean, other)
    assert not found(one, None, 100)[3][11:].any()


def test_certain_tokens_are_finite() -> None:
    """Logits far apart: probabilities underflow to 0, and 0 log 0 must stay 0 in the entropy and its gradient."""
    one = case(16, 16, scale=1e4)
    for tensor, expected in zip(found(one, None, 100), plain(one), strict=True):
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)


def test_a_loss_without_entropy_has_the_gradient_of_the_log_prob_alone() -> None:
    one = case(16, 16)
    logits = (one.hidden_ND @ one.head_VD.T).requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(logits, one.target_N, VocabShard.of(16, 16, None))
    logprobs.sum().backward()
    expected = torch.nn.functional.one_hot(one.target_N, 16) - logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, expected.double(), rtol=1e-12, atol=1e-14)
