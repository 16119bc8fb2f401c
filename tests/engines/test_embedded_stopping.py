"""When a response ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.engines.stopping import StopRule
from stretto.models.checkpoint import load_tokenizer
from stretto.types import FinishReason, Sampling


def ending(rule: StopRule, ids: list[int], sampling: Sampling) -> tuple[int, FinishReason] | None:
    """After how many of the ids the rule ends the response, and why; None when it never does."""
    for length in range(1, len(ids) + 1):
        reason = rule.reason(ids[:length], sampling)
        if reason is not None:
            return length, reason
    return None


def test_a_response_ends_at_its_first_stop(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode("the answer is 42.\nNext", add_special_tokens=False)
    assert ending(StopRule(tokenizer, ()), ids, Sampling(100)) is None
    assert ending(StopRule(tokenizer, ()), ids, Sampling(5)) == (5, FinishReason.LENGTH)
    assert ending(StopRule(tokenizer, ()), ids, Sampling(100, stop=("\n", "42"))) == (16, FinishReason.STOP)
    assert ending(StopRule(tokenizer, ()), ids, Sampling(16, stop=("42",))) == (16, FinishReason.STOP)
    assert ending(StopRule(tokenizer, (ids[2],)), ids, Sampling(100, stop=("42",))) == (3, FinishReason.STOP)
    assert ending(StopRule(tokenizer, (5000,)), ids, Sampling(100, stop_ids=(ids[1],))) == (2, FinishReason.STOP)


@pytest.mark.parametrize("stop", ["🙂", "é 🙂", "\n\n", "nswer i", "</answer>"])
def test_a_stop_string_is_seen_with_the_token_that_completes_it(smollm2_cut: Path, stop: str) -> None:
    tokenizer = load_tokenizer(smollm2_cut)
    ids = tokenizer.encode("The answer is café 🙂\n\n</answer> and more of it", add_special_tokens=False)
    expected = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    assert ending(StopRule(tokenizer, ()), ids, Sampling(1000, stop=("absent", stop))) == (expected, FinishReason.STOP)
    assert 1 < expected < len(ids)


def test_a_stop_string_is_found_at_the_end_of_a_long_response(smollm2_cut: Path) -> None:
    tokenizer = load_tokenizer(smollm2_cut)
    ids = tokenizer.encode("word 🙂 " * 200 + "END of it", add_special_tokens=False)
    length, reason = ending(StopRule(tokenizer, ()), ids, Sampling(10_000, stop=("END",))) or (0, None)
    assert reason is FinishReason.STOP
    assert str(tokenizer.decode(ids[:length])).endswith("END")
