"""Loading and splitting: held-out texts never come up in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stretto.config import RunConfig
from stretto.data import load_prompts, split_heldout
from stretto.types import Prompt

Write = Callable[..., str]
Make = Callable[..., RunConfig]

TEXTS = st.lists(st.integers(0, 12).map(str), min_size=2, max_size=40).filter(lambda texts: len(set(texts)) > 1)


def prompts_of(texts: list[str]) -> list[Prompt]:
    return [Prompt((1,), text, row) for row, text in enumerate(texts)]


def texts_of(prompts: list[Prompt]) -> set[str]:
    return {prompt.text for prompt in prompts}


@given(TEXTS, st.integers(0, 2**31 - 1), st.data())
def test_a_split_covers_every_text_and_never_overlaps(texts: list[str], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(set(texts)) - 1))
    train, heldout = split_heldout(prompts_of(texts), count, seed)
    assert len(heldout) == len(texts_of(heldout)) == count
    assert texts_of(train).isdisjoint(texts_of(heldout))
    assert [p.text for p in train] == [text for text in texts if text not in texts_of(heldout)]


@given(TEXTS, st.randoms(use_true_random=False))
def test_reordering_and_repeating_rows_does_not_change_the_split(texts: list[str], random) -> None:
    shuffled = texts + random.choices(texts, k=5)
    random.shuffle(shuffled)
    before = [p.text for p in split_heldout(prompts_of(texts), 1, 7)[1]]
    assert [p.text for p in split_heldout(prompts_of(shuffled), 1, 7)[1]] == before


def test_new_texts_displace_at_most_one_heldout_text_each() -> None:
    old = [str(n) for n in range(50)]
    before = texts_of(split_heldout(prompts_of(old), 20, 0)[1])
    after = texts_of(split_heldout(prompts_of([*old, "a", "b", "c"]), 20, 0)[1])
    assert len(before - after) == len(after & {"a", "b", "c"}) <= 3


def test_the_seed_chooses_what_is_held_out() -> None:
    texts = [str(n) for n in range(50)]
    chosen = {frozenset(texts_of(split_heldout(prompts_of(texts), 5, seed)[1])) for seed in range(4)}
    assert len(chosen) == 4


def test_prompts_are_tokenised_and_keep_row_and_fields(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(5)])
    found = load_prompts(make_config(source, heldout=2), tokenizer)
    assert sorted(p.row for p in found.train + found.heldout) == list(range(5))
    for prompt in found.train + found.heldout:
        assert prompt.text == f"{prompt.row} + 1 ="
        assert prompt.fields == {"answer": str(prompt.row + 1)}
        assert prompt.ids == tuple(tokenizer(prompt.text)["input_ids"])
        assert prompt.messages is None
    assert found.dropped == {"over_long": 0, "in_heldout": 0, "eval_over_long": 0}


def test_duplicates_of_heldout_prompts_are_kept_out_of_training_and_counted(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": str(n % 4), "answer": str(n)} for n in range(12)])
    found = load_prompts(make_config(source, heldout=1), tokenizer)
    assert len(found.heldout) == 1
    assert len(found.train) == 9
    assert found.dropped["in_heldout"] == 2


def test_chats_are_rendered_and_wrapped_text_stays_text_to_the_rewards(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    user = {"role": "user", "content": "hi"}
    chat = write_rows([{"prompt": [user]}], "chat.jsonl")
    text = write_rows([{"prompt": "hi"}], "text.jsonl")
    from_chat = load_prompts(make_config(chat, system="Be brief."), tokenizer).train[0]
    from_text = load_prompts(make_config(text, system="Be brief.", chat=True), tokenizer).train[0]
    assert from_chat.text == from_text.text == "<s>system Be brief.</s><s>user hi</s><s>assistant "
    assert from_chat.ids == from_text.ids
    assert from_chat.messages == ({"role": "system", "content": "Be brief."}, user)
    assert from_text.messages is None


def test_rows_in_the_eval_source_are_left_out_of_training_also_beyond_the_limit(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": str(n), "answer": ""} for n in range(6)])
    held = write_rows([{"prompt": str(n), "answer": ""} for n in range(3, 9)], "eval.jsonl")
    found = load_prompts(make_config(source, eval={"source": held, "limit": 2}), tokenizer)
    assert [p.text for p in found.train] == ["0", "1", "2"]
    assert [p.text for p in found.heldout] == ["3", "4"]
    assert found.dropped["in_heldout"] == 3


def test_the_limit_cuts_what_is_evaluated_not_what_is_set_aside(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": str(n), "answer": ""} for n in range(9)])
    whole = load_prompts(make_config(source, heldout=4), tokenizer)
    cut = load_prompts(make_config(source, heldout=4, eval={"limit": 2}), tokenizer)
    assert cut.heldout == whole.heldout[:2]
    assert cut.train == whole.train


def test_an_over_long_prompt_stops_with_row_and_length_or_is_dropped_and_counted(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": "short", "answer": ""}, {"prompt": "x" * 10, "answer": ""}])
    with pytest.raises(ValueError, match=r"row 1 .*11 tokens, more than data\.max_prompt_tokens = 10; raise"):
        load_prompts(make_config(source, max_prompt_tokens=10), tokenizer)
    assert len(load_prompts(make_config(source, max_prompt_tokens=11), tokenizer).train) == 2
    found = load_prompts(make_config(source, max_prompt_tokens=10, over_long="drop"), tokenizer)
    assert [p.row for p in found.train] == [0]
    assert found.dropped["over_long"] == 1


def test_nothing_left_to_train_on_is_refused(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": "same", "answer": ""}, {"prompt": "same", "answer": ""}])
    with pytest.raises(ValueError, match=r"data\.heldout = 1 leaves nothing to train on: .* 1 distinct prompts"):
        load_prompts(make_config(source, heldout=1), tokenizer)
    with pytest.raises(ValueError, match=r"nothing is left to train on: .*2 rows, of which 0 .* 2 have the text"):
        load_prompts(make_config(source, eval={"source": source}), tokenizer)
    with pytest.raises(ValueError, match=r"nothing is left to train on: .*2 rows, of which 2 .* 0 have the text"):
        load_prompts(make_config(source, max_prompt_tokens=2, over_long="drop"), tokenizer)
    long = write_rows([{"prompt": "longer", "answer": ""}], "long.jsonl")
    with pytest.raises(ValueError, match=r"eval\.source .* has no prompt of at most 5 tokens"):
        load_prompts(make_config(source, max_prompt_tokens=5, over_long="drop", eval={"source": long}), tokenizer)


def test_a_prompt_of_the_wrong_kind_is_refused_with_source_and_row(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": "x", "answer": ""}, {"prompt": None, "answer": ""}])
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1 \(the first is 0\): column 'prompt' must be text"):
        load_prompts(make_config(source), tokenizer)


def test_evaluation_reads_its_own_split_and_configuration(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config: Make
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "set"
    source.mkdir()
    entries = []
    for name in ("a", "b"):
        paths = [f"{{split: {split}, path: {name}-{split}.jsonl}}" for split in ("train", "test")]
        entries.append(f"- config_name: {name}\n  data_files: [{', '.join(paths)}]\n")
        for split in ("train", "test"):
            (source / f"{name}-{split}.jsonl").write_text(f'{{"prompt": "{name} {split}", "answer": ""}}\n')
    (source / "README.md").write_text("---\nconfigs:\n" + "".join(entries) + "---\n")

    def texts(data: dict[str, str], eval: dict[str, str]) -> tuple[str, str]:
        found = load_prompts(make_config(str(source), eval={"source": str(source), **eval}, **data), tokenizer)
        return found.train[0].text, found.heldout[0].text

    assert texts({"subset": "a"}, {"split": "test"}) == ("a train", "a test")
    assert texts({"subset": "a"}, {"subset": "b"}) == ("a train", "b train")
    assert texts({"subset": "b", "split": "test"}, {"subset": "a", "split": "train"}) == ("b test", "a train")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "own", "answer": ""}\n')
    config = make_config(str(rows), eval={"source": str(source), "split": "test", "subset": "b"})
    assert [p.text for p in load_prompts(config, tokenizer).heldout] == ["b test"]


def test_template_arguments_reach_the_template_and_need_a_chat(
    tokenizer: PreTrainedTokenizerFast, write_rows: Write, make_config: Make
) -> None:
    source = write_rows([{"prompt": "hi", "answer": ""}])
    loud = load_prompts(make_config(source, chat=True, template_args={"loud": True}), tokenizer)
    assert loud.train[0].text == "<s>user HI</s><s>assistant "
    assert load_prompts(make_config(source, chat=True), tokenizer).train[0].text == "<s>user hi</s><s>assistant "
    with pytest.raises(ValueError, match=r"row 0 .*data\.template_args needs a chat"):
        load_prompts(make_config(source, template_args={"loud": True}), tokenizer)
    with pytest.raises(ValueError, match=r"data\.template_args sets lout, which the model's chat template never reads"):
        load_prompts(make_config(source, chat=True, template_args={"lout": True}), tokenizer)
