"""The sample queue: every reservation ends once, and every token is somewhere (DESIGN, rule 10)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stretto.orchestration.queue import InlineQueue, TokenCounts
from stretto.types import FinishReason, Rollout, Version, VersionSpan

TOKENS = st.integers(0, 9)


def rollout_of(tokens: int, group_id: int = 0) -> Rollout:
    return Rollout(
        prompt_ids=(1,),
        response_ids=(2,) * tokens,
        logprobs_T=(-0.5,) * tokens,
        loss_mask_T=(1,) * tokens,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(Version(1, 0), 0, tokens),),
        group_id=group_id,
        seed=7,
        source_row=group_id,
        reward=1.0,
    )


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a model of it: `waiting` samples by (group, index), tokens `held` by group, `taken` groups."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = InlineQueue(TokenCounts(generated=5, trained=3, dropped=2))
        self.next_group = self.reserved = 0
        self.waiting: set[tuple[int, int]] = set()
        self.held: dict[int, dict[int, int]] = {}
        self.taken: set[int] = set()
        self.trained, self.dropped = 3, 2
        self.ended: Counter[str] = Counter()

    @rule(samples=st.integers(1, 4))
    def reserve(self, samples: int) -> None:
        group, self.next_group = self.next_group, self.next_group + 1
        self.queue.reserve(group, samples)
        self.reserved += samples
        self.held[group] = {}
        self.waiting |= {(group, index) for index in range(samples)}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=TOKENS)
    def offer(self, data: st.DataObject, tokens: int) -> None:
        group, index = self._one_waiting(data)
        self.queue.offer(group, index, rollout_of(tokens, group))
        self.held[group][index] = tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=TOKENS)
    def drop(self, data: st.DataObject, tokens: int) -> None:
        group, index = self._one_waiting(data)
        self.queue.drop(group, index, tokens, "reward_crash")
        self.dropped += tokens
        self.ended["reward_crash"] += 1
        if not self._open(group) and not self.held[group]:
            del self.held[group]

    @rule()
    def take(self) -> None:
        ready = {key for key in self.held if not self._open(key) and key not in self.taken}
        found = self.queue.take()
        assert list(found) == sorted(ready), "complete groups, in order, each once"
        for key, group in found.items():
            assert [len(one.response_ids) for one in group] == [self.held[key][i] for i in sorted(self.held[key])]
        self.taken |= ready

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), trained=st.booleans())
    def end(self, data: st.DataObject, trained: bool) -> None:
        group = self._one_of(data, self.taken)
        self.taken.remove(group)
        tokens = self.held.pop(group)
        if trained:
            self.queue.end_trained(group)
            self.trained += sum(tokens.values())
            self.ended["trained"] += len(tokens)
        else:
            self.queue.end_dropped(group, "group_too_small")
            self.dropped += sum(tokens.values())
            self.ended["group_too_small"] += len(tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        group = self._one_of(data, set(self.held))
        self.queue.give_back(group)
        open_samples = self._open(group)
        self.waiting -= open_samples
        self.taken.discard(group)
        tokens = self.held.pop(group)
        self.dropped += sum(tokens.values())
        self.ended["returned"] += len(tokens) + len(open_samples)

    @precondition(lambda self: self.next_group)
    @rule(data=st.data())
    def nothing_ends_twice(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, self.next_group - 1))
        settled = {index for index in range(4) if (group, index) not in self.waiting}
        for index in settled:
            with pytest.raises((AssertionError, KeyError)):
                self.queue.offer(group, index, rollout_of(1))
            with pytest.raises((AssertionError, KeyError)):
                self.queue.drop(group, index, 1, "again")
        if group not in self.held:
            with pytest.raises(KeyError):
                self.queue.end_trained(group)

    @invariant()
    def every_token_is_somewhere(self) -> None:
        tokens = self.queue.tokens
        in_flight = sum(sum(group.values()) for group in self.held.values())
        assert (tokens.trained, tokens.dropped, tokens.in_flight) == (self.trained, self.dropped, in_flight)
        assert tokens.generated == self.trained + self.dropped + in_flight

    @invariant()
    def every_reservation_ended_once_or_is_open(self) -> None:
        still = len(self.waiting) + sum(map(len, self.held.values()))
        assert sum(self.ended.values()) + still == self.reserved
        counted = {reason: count for reason, count in self.queue.reasons.items() if count}
        expected = {
            reason: count for reason, count in self.ended.items() if count and reason not in ("trained", "returned")
        }
        assert counted == expected
        assert (self.queue.oldest_s() > 0) == bool(self.held)

    def _one_waiting(self, data: st.DataObject) -> tuple[int, int]:
        chosen = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(chosen)
        return chosen

    def _one_of(self, data: st.DataObject, groups: set[int]) -> int:
        return data.draw(st.sampled_from(sorted(groups)))

    def _open(self, group: int) -> set[tuple[int, int]]:
        return {key for key in self.waiting if key[0] == group}


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase


def test_a_group_does_not_end_before_it_was_taken() -> None:
    queue = InlineQueue()
    queue.reserve(0, 1)
    queue.offer(0, 0, rollout_of(3))
    with pytest.raises(AssertionError):
        queue.end_trained(0)
    with pytest.raises(AssertionError):
        queue.reserve(0, 1)
