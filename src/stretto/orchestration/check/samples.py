"""Fixed samples that a check scores, and those that it draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.types import Batch, Completion, FinishReason, Request, Rollout, Sampling

_SPREAD = 48
_LENGTHS = ((7, (18, 11)), (3, (21, 14)), (12, (9, 16)))
"""Prompt and response lengths of each group."""


@dataclass(frozen=True)
class Tokens:
    """What samples may be made of: ids below `vocabulary` but for `padding`, at most `longest` of them.

    The padding id never occurs in a sample, and transformers gives its embedding no gradient.
    """

    vocabulary: int
    longest: int
    padding: int | None = None

    def draw(self, seed: random.Random, count: int) -> tuple[int, ...]:
        """So many random ids."""
        usable = [one for one in (self.padding,) if one is not None and 0 <= one < self.vocabulary]
        picks = (seed.randrange(self.vocabulary - len(usable)) for _ in range(count))
        return tuple(pick + (pick >= usable[0] if usable else 0) for pick in picks)


_ADVANTAGES = (1.0, -0.6, 0.4, -1.2, 0.8, -0.5)


def scored_rollouts(tokens: Tokens) -> list[Rollout]:
    """Long responses of random tokens, then many of one token: ids spread evenly over the vocabulary, both ends too."""
    draw = random.Random(3)
    found = [one for group in range(len(_LENGTHS)) for one in _group(draw, tokens, group)]
    prompt = tokens.draw(draw, 4)
    ids = sorted({round(k * (tokens.vocabulary - 1) / (_SPREAD - 1)) for k in range(_SPREAD)})
    return [*found, *(_rollout(prompt, (one,), len(_LENGTHS), 1.0) for one in ids)]


def training_batch(tokens: Tokens) -> Batch:
    """Groups with fixed advantages, at two temperatures."""
    draw = random.Random(5)
    rollouts = [one for group in range(len(_LENGTHS)) for one in _group(draw, tokens, group, (1.0, 0.7))]
    return Batch(rollouts, _ADVANTAGES)


def _group(draw: random.Random, tokens: Tokens, group: int, temperatures: Sequence[float] = (1.0,)) -> list[Rollout]:
    length, responses = _LENGTHS[group]
    prompt, temperature = tokens.draw(draw, length), temperatures[group % len(temperatures)]
    return [
        _rollout(prompt, tokens.draw(draw, min(size, tokens.longest - length)), group, temperature)
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


def requests(tokens: Tokens, rank: int, temperature: float, new_tokens: int) -> list[Request]:
    """What a rank's engine is asked for: three prompts, two samples each."""
    draw = random.Random(100 + rank)
    sampling = Sampling(max_new_tokens=min(new_tokens, tokens.longest - 8), temperature=temperature)
    return [Request(n, tokens.draw(draw, 3 + 2 * n), (2 * n, 2 * n + 1), sampling) for n in range(3)]


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
