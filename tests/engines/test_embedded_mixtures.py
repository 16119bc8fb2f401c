"""Any mixture of groups, lengths and rows gives each sample what it gives alone, for each family of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import Served, assert_logprobs, request, run, serve_alias
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GraniteConfig, LlamaConfig, Qwen2Config, Qwen3Config

from stretto.types import Completion, FinishReason

LENGTHS = (1, 2, 7, 30)
SEEDS = range(6)
NEW = 10


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> dict[tuple[int, int], Completion]:
    """What each (prompt length, seed) gives when nothing else is generated."""
    served = serve_alias(tiny_model, max_sequences=1)
    return {
        (length, seed): run(served.engine, request(0, served.prompt(length), [seed], max_new_tokens=NEW))[0, 0]
        for length in LENGTHS
        for seed in SEEDS
    }


@pytest.fixture(scope="module")
def by_rows(tiny_model: Path) -> dict[int, Served]:
    return {rows: serve_alias(tiny_model, max_sequences=rows) for rows in (1, 2, 3, 5, 64)}


groups = st.tuples(
    st.sampled_from(LENGTHS), st.lists(st.sampled_from(SEEDS), min_size=1, max_size=6), st.integers(1, NEW)
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shapes=st.lists(groups, min_size=1, max_size=6),
    rows=st.sampled_from((1, 2, 3, 5, 64)),
    stop=st.integers(0, NEW - 1),
)
def test_every_sample_is_what_it_is_alone(
    alone: dict[tuple[int, int], Completion],
    by_rows: dict[int, Served],
    shapes: list[tuple[int, list[int], int]],
    rows: int,
    stop: int,
) -> None:
    served = by_rows[rows]
    stop_id = alone[LENGTHS[0], SEEDS[0]].response_ids[stop]  # ends some samples early, so that rows move
    requests = [
        request(id, served.prompt(length), seeds, max_new_tokens=new, stop_ids=(stop_id,))
        for id, (length, seeds, new) in enumerate(shapes)
    ]
    for (id, index), got in run(served.engine, *requests).items():
        length, seeds, new = shapes[id]
        whole = alone[length, seeds[index]]
        ids = whole.response_ids[:new]
        if stop_id in ids:
            ids = ids[: ids.index(stop_id) + 1]
        assert got.response_ids == ids
        assert got.logprobs_T == pytest.approx(whole.logprobs_T[: len(ids)], abs=1e-5, rel=0)
        assert got.finish_reason is (FinishReason.STOP if ids[-1] == stop_id else FinishReason.LENGTH)


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = {
    "llama-untied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-one-kv-head": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama-no-grouping": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "qwen2-bias": lambda: Qwen2Config(**SMALL),
    "qwen3-head-norms": lambda: Qwen3Config(**SMALL, head_dim=16),
    "granite-scaled-logits": lambda: GraniteConfig(
        **SMALL, logits_scaling=4.0, attention_multiplier=0.1, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_every_family_are_those_of_transformers(family: str, save_tiny: Callable[[Any], Path]) -> None:
    served = serve_alias(save_tiny(FAMILIES[family]()), max_sequences=4)
    requests = [
        request(id, served.prompt(length), (id, id + 1, id + 2), temperature=temperature)
        for id, (length, temperature) in enumerate([(1, 1.0), (50, 0.7), (12, 1.3)])
    ]
    for (id, _), completion in run(served.engine, *requests).items():
        assert_logprobs(served, requests[id], completion)


def test_responses_longer_than_the_first_slab_are_those_of_transformers(tiny_model: Path) -> None:
    served = serve_alias(tiny_model, max_sequences=2)
    one = request(0, served.prompt(3), range(3), max_new_tokens=100)
    for completion in run(served.engine, one).values():
        assert_logprobs(served, one, completion)
