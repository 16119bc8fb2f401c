"""Fixed samples that a check scores, and those that it draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from stretto.types import Batch, Completion, FinishReason, Request, Rollout, Sampling

_SPREAD = 48
_LENGTHS = ((7, (18, 11)), (3, (21, 14)), (12, (9, 16)))
"""Prompt and response lengths of each group."""
_ADVANTAGES = (1.0, -0.6, 0.4, -1.2, 0.8, -0.5)


def scored_rollouts(vocabulary: int, longest: int) -> list[Rollout]:
    """Long responses of random tokens, then many of one token: ids spread evenly over the vocabulary, both ends too."""
    draw = random.Random(3)
    found = [one for group in range(len(_LENGTHS)) for one in _group(draw, vocabulary, longest, group)]
    prompt = tuple(draw.randrange(vocabulary) for _ in range(4))
    ids = sorted({round(k * (vocabulary - 1) / (_SPREAD - 1)) for k in range(_SPREAD)})
    return [*found, *(_rollout(prompt, (one,), len(_LENGTHS), 1.0) for one in ids)]


def training_batch(vocabulary: int, longest: int) -> Batch:
    """Groups with fixed advantages, at two temperatures."""
    draw = random.Random(5)
    rollouts = [one for group in range(len(_LENGTHS)) for one in _group(draw, vocabulary, longest, group, (1.0, 0.7))]
    return Batch(rollouts, _ADVANTAGES)


def _group(
    draw: random.Random, vocabulary: int, longest: int, group: int, temperatures: Sequence[float] = (1.0,)
) -> list[Rollout]:
    length, responses = _LENGTHS[group]
    prompt = tuple(draw.randrange(vocabulary) for _ in range(length))
    return [
        _rollout(
            prompt,
            tuple(draw.randrange(vocabulary) for _ in range(min(size, longest - length))),
            group,
            temperatures[group % len(temperatures)],
        )
        for size in responses
    ]


def _rollout(prompt: tuple[int, ...], response: tuple[int, ...], group: int, temperature: float) -> Rollout:
    return Rollout(
        prompt_ids=prompt,
        response_ids=response,
        logprobs_T=(0.0,) * len(response),
        loss_mask_T=(1,) * len(response),
        temperature=temperature,
        finish_reason=FinishReason.LENGTH,
        version_spans=(),
        group_id=group,
        seed=0,
        source_row=group,
    )


def with_logprobs(rollouts: Sequence[Rollout], logprobs: Sequence[Sequence[float]]) -> list[Rollout]:
    """The same rollouts, sampled with these log-probs."""
    return [replace(one, logprobs_T=tuple(values)) for one, values in zip(rollouts, logprobs, strict=True)]


def requests(vocabulary: int, rank: int, temperature: float, new_tokens: int) -> list[Request]:
    """What a rank's engine is asked for: three prompts, two samples each."""
    draw = random.Random(100 + rank)
    sampling = Sampling(max_new_tokens=new_tokens, temperature=temperature)
    return [
        Request(n, tuple(draw.randrange(vocabulary) for _ in range(3 + 2 * n)), (2 * n, 2 * n + 1), sampling)
        for n in range(3)
    ]


def to_rollouts(asked: Sequence[Request], completions: Sequence[Completion]) -> list[Rollout]:
    """Completions as rollouts to be scored anew."""
    by_id = {one.id: one for one in asked}
    return [
        replace(
            _rollout(
                by_id[one.request_id].prompt_ids,
                one.response_ids,
                one.request_id,
                by_id[one.request_id].sampling.temperature,
            ),
            logprobs_T=one.logprobs_T,
        )
        for one in completions
    ]
