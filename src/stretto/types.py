"""The nouns that flow between the parts: prompts, rollouts, batches and weight versions.

Nothing here imports torch, so that every part (and every process) can speak of samples cheaply.
Suffixes name axes: ``_T`` is one value per response token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Version(NamedTuple):
    """A version of the weights: ``incarnation`` rises at every restart, ``number`` at every publication."""

    incarnation: int
    number: int


class VersionSpan(NamedTuple):
    """Response tokens ``start <= t < stop`` were sampled by ``version``."""

    version: Version
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, tokenised.

    ``row`` is its index in the source; ``fields`` are its other columns, handed to the rewards as they are.
    ``messages`` is set when the row was a chat, ``text`` is always what the model reads.
    """

    ids: tuple[int, ...]
    text: str
    row: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``top_k = 0``, ``top_p = 1`` and ``min_p = 0`` switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A group: one prompt and one sample per seed. ``id`` is unique among the requests in flight."""

    id: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response, as the engine reports it.

    ``logprobs_T`` are ``log_softmax(logits / temperature)`` of the sampled tokens over the whole vocabulary, before
    any filter (temperature 0 reports temperature 1). ``index`` is the sample's place in its request.
    """

    request_id: int
    index: int
    seed: int
    response_ids: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample on its way from the engine to the loss; token ids are the record.

    ``group_id`` is the position of its prompt in the prompt stream. ``reward`` is None until it was scored.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    loss_mask_T: tuple[int, ...]
    temperature: float
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    group_id: int
    seed: int
    source_row: int
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        if len(self.logprobs_T) != length or len(self.loss_mask_T) != length:
            raise ValueError(
                f"a rollout needs one log-prob and one mask value per response token: {length} tokens, "
                f"{len(self.logprobs_T)} log-probs, {len(self.loss_mask_T)} mask values"
            )

    @classmethod
    def of(
        cls, completion: Completion, prompt_ids: tuple[int, ...], *, temperature: float, group_id: int, source_row: int
    ) -> Rollout:
        """What an engine sampled, every token of it in the loss; not scored yet."""
        return cls(
            prompt_ids=prompt_ids,
            response_ids=completion.response_ids,
            logprobs_T=completion.logprobs_T,
            loss_mask_T=(1,) * len(completion.response_ids),
            temperature=temperature,
            finish_reason=completion.finish_reason,
            version_spans=completion.version_spans,
            group_id=group_id,
            seed=completion.seed,
            source_row=source_row,
        )

    @property
    def response_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.response_ids)

    @property
    def loss_tokens(self) -> int:
        """How many response tokens enter the loss."""
        return sum(self.loss_mask_T)

    def scored(self, score: Score) -> Rollout:
        """The same rollout with its reward; the score must not be a failure."""
        assert score.failure is None, "a failed score is never a value"
        return replace(self, reward=score.reward, reward_parts=dict(score.parts))

    def regrouped(self, group_id: int) -> Rollout:
        """The same rollout in another group."""
        return replace(self, group_id=group_id)

    def to_json(self, **beside: Any) -> str:
        """One JSON line, with further keys `beside` the rollout's; floats survive the round trip bit by bit."""
        return json.dumps(asdict(self) | beside)

    @classmethod
    def from_json(cls, line: str) -> Rollout:
        """Inverse of :meth:`to_json`. Raises ValueError naming what is wrong with the line."""
        try:
            return cls.from_dict(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"not a recorded rollout: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Rollout:
        """The rollout in a decoded line; keys of others are passed over. Raises ValueError for what is wrong."""
        try:
            spans = tuple(VersionSpan(Version(*version), start, stop) for version, start, stop in raw["version_spans"])
            return cls(
                prompt_ids=tuple(raw["prompt_ids"]),
                response_ids=tuple(raw["response_ids"]),
                logprobs_T=tuple(raw["logprobs_T"]),
                loss_mask_T=tuple(raw["loss_mask_T"]),
                temperature=raw["temperature"],
                finish_reason=FinishReason(raw["finish_reason"]),
                version_spans=spans,
                group_id=raw["group_id"],
                seed=raw["seed"],
                source_row=raw["source_row"],
                reward=raw["reward"],
                reward_parts=raw["reward_parts"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a recorded rollout: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward: ``kind`` is crash, timeout, not_finite, wrong_length, wrong_type or abstained."""

    kind: str
    reward: str
    detail: str


@dataclass(frozen=True, slots=True)
class Score:
    """A sample's reward and its parts (by reward name), or the failure that kept it from having one."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rollout phase hands to the trainer: this rank's rollouts and one advantage for each."""

    rollouts: Sequence[Rollout]
    advantages: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.rollouts) == len(self.advantages)
