"""Cutting a batch: every loss token once, in its own context, within the budget."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.batching import MicroBatch, cut, filler, slot_offsets
from stretto.models.checkpoint import load_model
from stretto.trainers.fsdp.policy import Policy
from stretto.types import FinishReason, Rollout

Batching = Literal["packed", "padded"]


def rollout(prompt: tuple[int, ...], response: list[int], mask: list[int], temperature: float, group: int) -> Rollout:
    return Rollout(
        prompt_ids=prompt,
        response_ids=tuple(response),
        logprobs_T=(0.0,) * len(response),
        loss_mask_T=tuple(mask),
        temperature=temperature,
        finish_reason=FinishReason.STOP,
        version_spans=(),
        group_id=group,
        seed=0,
        source_row=group,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    """Groups of samples with a prompt, in any order; two groups may have the same prompt."""
    tokens = st.integers(2, 96)
    found = []
    for group in range(draw(st.integers(1, 4))):
        prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=9)))
        temperature = draw(st.sampled_from([0.5, 1.0, 2.0]))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(tokens, min_size=1, max_size=8))
            mask = [int(draw(st.booleans())) for _ in response]
            found.append(rollout(prompt, response, mask, temperature, group))
    return draw(st.permutations(found))


def visible(micro: MicroBatch, row: int, at: int) -> list[int]:
    """The places of a row that the token at `at` attends to, in order."""
    if micro.attention_BLL is None:
        return list(range(at + 1))
    return micro.attention_BLL[row, at].nonzero()[:, 0].tolist()


@given(rollouts=batches(), batching=st.sampled_from(["packed", "padded"]), budget=st.integers(1, 80))
@settings(deadline=None, max_examples=120)
def test_every_loss_token_is_predicted_once_from_exactly_its_context(
    rollouts: list[Rollout], batching: Batching, budget: int
) -> None:
    micros = cut(rollouts, range(len(rollouts)), batching=batching, micro_batch_tokens=budget)
    owners = [(one, t) for one in rollouts for t, keep in enumerate(one.loss_mask_T) if keep]
    slots = [slot for micro in micros for slot in micro.slot_N.tolist()]
    assert sorted(slots) == list(range(len(owners)))
    for micro in micros:
        width = micro.input_ids_BL.shape[1]
        columns = (micro.slot_N, micro.predict_N, micro.target_N, micro.temperature_N)
        for slot, place, target, temperature in zip(*(column.tolist() for column in columns), strict=True):
            one, t = owners[slot]
            assert (target, temperature) == (one.response_ids[t], one.temperature)
            row, at = divmod(place, width)
            context = visible(micro, row, at)
            assert micro.input_ids_BL[row, context].tolist() == [*one.prompt_ids, *one.response_ids[:t]]
            assert micro.position_ids_BL[row, context].tolist() == list(range(len(context)))
            # Keys and values depend on what *they* saw: each token of the context sees the context before it.
            assert all(visible(micro, row, seen) == context[: i + 1] for i, seen in enumerate(context))


@given(rollouts=batches(), batching=st.sampled_from(["packed", "padded"]), budget=st.integers(1, 80))
@settings(deadline=None, max_examples=80)
def test_a_micro_batch_stays_within_the_budget_unless_one_sample_is_longer(
    rollouts: list[Rollout], batching: Batching, budget: int
) -> None:
    longest = max(len(one.prompt_ids) + len(one.response_ids) - 1 for one in rollouts)
    for micro in cut(rollouts, range(len(rollouts)), batching=batching, micro_batch_tokens=budget):
        assert micro.input_ids_BL.numel() <= max(budget, longest)


@given(rollouts=batches(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_only_the_chosen_samples_are_computed_and_slots_stay_those_of_the_batch(
    rollouts: list[Rollout], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(rollouts))), unique=True))
    offsets = slot_offsets(rollouts)
    expected = [slot for i in sorted(chosen) for slot in range(offsets[i], offsets[i + 1])]
    micros = cut(rollouts, chosen, batching="packed", micro_batch_tokens=50)
    assert sorted(slot for micro in micros for slot in micro.slot_N.tolist()) == expected


def test_a_group_shares_one_prompt_and_the_last_token_is_no_input() -> None:
    group = [rollout((5, 6, 7), [10 + i, 20 + i], [1, 1], 1.0, 0) for i in range(3)]
    (micro,) = cut(group, range(3), batching="packed", micro_batch_tokens=100)
    assert micro.input_ids_BL.tolist() == [[5, 6, 7, 10, 11, 12]]
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 3, 3, 3]]


def test_samples_of_a_group_with_different_prompts_do_not_share_one() -> None:
    pair = [rollout(prompt, [9, 9], [1, 1], 1.0, 0) for prompt in ((5, 6), (5, 7))]
    (micro,) = cut(pair, range(2), batching="packed", micro_batch_tokens=100)
    assert sorted(map(tuple, micro.input_ids_BL.tolist())) == [(5, 6, 9), (5, 7, 9)]


def test_nothing_to_train_on_is_no_micro_batch() -> None:
    assert cut([rollout((5,), [9, 9], [0, 0], 1.0, 0)], [0], batching="packed", micro_batch_tokens=100) == []


@pytest.mark.parametrize("budget", [1, 40, 400])
def test_packed_and_padded_rows_give_the_same_log_probs_as_a_sample_alone(tiny_model: Path, budget: int) -> None:
    draw = random.Random(3)

    def some(length: int) -> list[int]:
        return [draw.randrange(2, 97) for _ in range(length)]

    prompts = [tuple(some(length)) for length in (1, 6, 13)]
    rollouts = [
        rollout(prompts[group], some(length), [int(t % 3 != 1) for t in range(length)], 0.5 + group, group)
        for group in range(3)
        for length in (1, 4, 9)
    ]
    model = load_model(tiny_model, torch.float64)
    policy = Policy(model, logit_chunk_tokens=1024)
    with torch.no_grad():
        alone = torch.cat([alone_logprobs(model, one) for one in rollouts])
        for batching in ("packed", "padded"):
            flat = torch.full_like(alone, torch.nan)
            for micro in cut(rollouts, range(9), batching=batching, micro_batch_tokens=budget):
                flat[micro.slot_N] = policy(micro)[0]
            torch.testing.assert_close(flat, alone, rtol=1e-6, atol=1e-6)  # its norms compute in float32


def alone_logprobs(model, one: Rollout) -> torch.Tensor:
    """Log-probs of a sample's loss tokens from its own forward pass over all logits."""
    logits_TV = model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / one.temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    first = len(one.prompt_ids) - 1
    kept = [t for t, keep in enumerate(one.loss_mask_T) if keep]
    return logprobs_TV[[first + t for t in kept], [one.response_ids[t] for t in kept]]


def test_the_filler_is_a_pass_without_loss_tokens_that_still_reaches_every_weight(tiny_model: Path) -> None:
    policy = Policy(load_model(tiny_model, torch.float32), logit_chunk_tokens=4)
    logprobs, entropies = policy(filler())
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters())
