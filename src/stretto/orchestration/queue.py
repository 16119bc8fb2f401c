"""The sample queue: what was reserved for generation and how each reservation ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


@dataclass
class TokenCounts:
    """Response tokens since the run began: generated = trained + dropped + in flight, always."""

    generated: int = 0
    trained: int = 0
    dropped: int = 0

    @property
    def in_flight(self) -> int:
        """Generated, and neither trained nor dropped yet."""
        return self.generated - self.trained - self.dropped


class Tokens(Protocol):
    """What the queue holds: a rollout, or what stands for one whose tokens are elsewhere."""

    @property
    def response_tokens(self) -> int: ...


Item = TypeVar("Item", bound=Tokens)


class SampleQueue(Protocol[Item]):
    """Every reservation (one sample of a group) ends exactly once: trained, dropped with a reason, or returned."""

    def reserve(self, group_id: int, samples: int) -> None:
        """Samples of a group are about to be generated."""
        ...

    def offer(self, group_id: int, index: int, rollout: Item) -> None:
        """A sample was generated and scored."""
        ...

    def drop(self, group_id: int, index: int, tokens: int, reason: str) -> None:
        """A sample that was never offered is given up after `tokens` response tokens."""
        ...

    def take(self, limit: int | None = None) -> Mapping[int, list[Item]]:
        """Complete groups (every sample offered or dropped), the `limit` lowest ids; in flight until they end."""
        ...

    def end_trained(self, group_id: int) -> None:
        """The group's taken samples were trained on."""
        ...

    def end_dropped(self, group_id: int, reason: str) -> None:
        """The group's taken samples are given up."""
        ...

    def give_back(self, group_id: int) -> None:
        """The group's samples return to the prompts; tokens already generated for them count as dropped."""
        ...

    def oldest_s(self) -> float:
        """Seconds since the oldest unended reservation was made; 0 when there is none."""
        ...

    @property
    def tokens(self) -> TokenCounts:
        """Response tokens since the run began."""
        ...

    def in_flight_tokens(self) -> int:
        """Response tokens of samples offered and not ended, counted from what the queue holds."""
        ...

    def drain_reasons(self) -> Counter[str]:
        """Samples dropped since the last call, by reason."""
        ...


@dataclass
class _Group(Generic[Item]):
    samples: int
    reserved_at: float
    offered: dict[int, Item] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    taken: bool = False

    def check_open(self, index: int) -> None:
        assert 0 <= index < self.samples, f"sample {index} was never reserved"
        assert index not in self.offered, f"sample {index} was already offered"
        assert index not in self.ended, f"sample {index} already ended"

    @property
    def complete(self) -> bool:
        return len(self.offered) + len(self.ended) == self.samples


class InlineQueue(Generic[Item]):
    """Meets :class:`SampleQueue` inside one process. `tokens` may carry on from a checkpoint."""

    def __init__(self, tokens: TokenCounts | None = None):
        self.tokens = tokens or TokenCounts()
        self.reasons: Counter[str] = Counter()
        self._groups: dict[int, _Group[Item]] = {}

    def reserve(self, group_id: int, samples: int) -> None:
        """See the contract."""
        assert group_id not in self._groups, f"group {group_id} is reserved already"
        self._groups[group_id] = _Group(samples, time.monotonic())

    def offer(self, group_id: int, index: int, rollout: Item) -> None:
        """See the contract."""
        group = self._groups[group_id]
        group.check_open(index)
        group.offered[index] = rollout
        self.tokens.generated += rollout.response_tokens

    def drop(self, group_id: int, index: int, tokens: int, reason: str) -> None:
        """See the contract."""
        group = self._groups[group_id]
        group.check_open(index)
        group.ended.add(index)
        self.tokens.generated += tokens
        self._count_dropped(tokens, reason, 1)
        self._forget_if_ended(group_id)

    def take(self, limit: int | None = None) -> dict[int, list[Item]]:
        """See the contract."""
        complete = [(key, group) for key, group in sorted(self._groups.items()) if group.complete and not group.taken]
        ready = dict(complete[:limit])
        for group in ready.values():
            group.taken = True
        return {key: [group.offered[index] for index in sorted(group.offered)] for key, group in ready.items()}

    def end_trained(self, group_id: int) -> None:
        """See the contract."""
        group = self._end(group_id)
        self.tokens.trained += sum(rollout.response_tokens for rollout in group.offered.values())

    def end_dropped(self, group_id: int, reason: str) -> None:
        """See the contract."""
        group = self._end(group_id)
        tokens = sum(rollout.response_tokens for rollout in group.offered.values())
        self._count_dropped(tokens, reason, len(group.offered))

    def give_back(self, group_id: int) -> None:
        """See the contract."""
        group = self._groups.pop(group_id)
        self._count_dropped(sum(rollout.response_tokens for rollout in group.offered.values()), "returned", 0)

    def roll_back(self, trained: int) -> None:
        """Everything that is open ends, and so does what was trained beyond `trained` tokens: that lineage is lost."""
        for group in self._groups.values():
            tokens = sum(rollout.response_tokens for rollout in group.offered.values())
            self._count_dropped(tokens, "rolled_back", len(group.offered))
        self._groups.clear()
        self.tokens.dropped += self.tokens.trained - trained
        self.tokens.trained = trained

    @property
    def open_groups(self) -> list[int]:
        """Groups that have not ended."""
        return sorted(self._groups)

    @property
    def ready(self) -> int:
        """Complete groups that nobody took."""
        return sum(group.complete and not group.taken for group in self._groups.values())

    def oldest_s(self) -> float:
        """See the contract."""
        return max((time.monotonic() - group.reserved_at for group in self._groups.values()), default=0.0)

    def in_flight_tokens(self) -> int:
        """See the contract."""
        held = (rollout for group in self._groups.values() for rollout in group.offered.values())
        return sum(rollout.response_tokens for rollout in held)

    def drain_reasons(self) -> Counter[str]:
        """See the contract."""
        drained, self.reasons = self.reasons, Counter()
        return drained

    def _end(self, group_id: int) -> _Group[Item]:
        group = self._groups[group_id]
        assert group.taken, f"group {group_id} ends before it was taken"
        del self._groups[group_id]
        return group

    def _count_dropped(self, tokens: int, reason: str, samples: int) -> None:
        self.tokens.dropped += tokens
        self.reasons[reason] += samples

    def _forget_if_ended(self, group_id: int) -> None:
        group = self._groups[group_id]
        if len(group.ended) == group.samples:
            del self._groups[group_id]
