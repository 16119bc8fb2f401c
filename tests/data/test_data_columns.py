"""Each column convention: what becomes the prompt, what the fields."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.data.columns import find_columns, read_row

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "extra_info": {"index": 5},
}


def read(row: dict[str, Any], format: str = "auto", prompt_key: str | None = None, label_key: str | None = None) -> Any:
    return read_row(row, find_columns(row, format, prompt_key, label_key))


@pytest.mark.parametrize("format", ["auto", "stretto"])
def test_stretto_rows(format: str) -> None:
    assert read({"prompt": "3 + 4 =", "answer": "7", "level": 2}, format) == ("3 + 4 =", {"answer": "7", "level": 2})


@pytest.mark.parametrize("format", ["auto", "trl"])
def test_trl_rows_keep_every_other_column_under_its_own_name(format: str) -> None:
    assert read({"prompt": CHAT, "topic": "sums"}, format) == (tuple(CHAT), {"topic": "sums"})
    assert read({"prompt": "x", "solution": "7"}, format) == ("x", {"solution": "7", "answer": "7"})


@pytest.mark.parametrize("format", ["auto", "verl"])
def test_verl_rows(format: str) -> None:
    prompt, fields = read(VERL, format)
    assert prompt == tuple(CHAT)
    assert fields["answer"] == fields["ground_truth"] == "7"
    assert fields["data_source"] == "openai/gsm8k"
    assert fields["extra_info"] == {"index": 5}
    assert fields["ability"] == "math"


@pytest.mark.parametrize("format", ["auto", "slime"])
@pytest.mark.parametrize("prompt_column", ["input", "prompt"])
def test_slime_rows_keep_their_metadata(format: str, prompt_column: str) -> None:
    row = {prompt_column: "3 + 4 =", "label": "7", "metadata": {"rm_type": "math"}}
    assert read(row, format) == ("3 + 4 =", {"label": "7", "answer": "7", "metadata": {"rm_type": "math"}})


def test_keys_override_the_names_of_the_format() -> None:
    row = {"question": "3 + 4 =", "steps": "3 + 4 = 7 #### 7", "final": "7"}
    fields = {"answer": "7", "final": "7", "steps": row["steps"]}
    assert read(row, "auto", "question", "final") == ("3 + 4 =", fields)
    assert read(row, "slime", "question", "final") == ("3 + 4 =", fields)
    assert read(row, "auto", "question") == ("3 + 4 =", {"final": "7", "steps": row["steps"]})


@pytest.mark.parametrize("format", ["auto", "stretto", "trl", "slime"])
@pytest.mark.parametrize("label_key", ["label", "meta.final"])
def test_a_label_key_that_would_hide_the_column_answer_is_refused(format: str, label_key: str) -> None:
    row = {"prompt": "3 + 4 =", "answer": "3 + 4 = 7 #### 7", "label": "7", "meta": {"final": "7"}}
    with pytest.raises(ValueError, match=rf"data\.label_key = '{label_key}' .*column 'answer'"):
        read(row, format, None, label_key)
    assert read(row, format, None, "answer")[1] == {name: row[name] for name in row if name != "prompt"}


@pytest.mark.parametrize("prompt_key", [None, "prompt", "question"])
def test_a_row_with_an_answer_and_a_label_keeps_both(prompt_key: str | None) -> None:
    row = {prompt_key or "prompt": "3 + 4 =", "answer": "7", "label": 1}
    assert read(row, "auto", prompt_key) == ("3 + 4 =", {"answer": "7", "label": 1})


def test_a_key_can_name_a_nested_value() -> None:
    assert read(VERL, "verl", None, "extra_info.index")[1]["answer"] == 5


def test_auto_says_which_columns_it_saw() -> None:
    with pytest.raises(ValueError, match=r"columns completion, query: .*data\.prompt_key"):
        read({"query": "x", "completion": "y"})


@pytest.mark.parametrize(
    ("format", "prompt_key", "label_key", "message"),
    [
        ("stretto", None, None, r"no column 'answer', .*did you mean 'answers'\? valid: answers, prompt"),
        ("slime", None, None, r"no column 'label', which data\.format = slime reads .valid: answers, prompt"),
        ("verl", None, None, r"no column 'reward_model\.ground_truth'"),
        ("auto", "promt", None, r"no column 'promt', .*did you mean 'prompt'"),
        ("trl", None, "answer", r"no column 'answer', .*did you mean 'answers'"),
    ],
)
def test_a_missing_column_is_named_with_those_that_exist(
    format: str, prompt_key: str | None, label_key: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read({"prompt": "x", "answers": "y"}, format, prompt_key, label_key)


def test_a_later_row_without_the_column_is_refused() -> None:
    columns = find_columns({"prompt": "x", "answer": "y"}, "auto", None, None)
    with pytest.raises(ValueError, match=r"no column 'answer' .*every row needs the columns of the first"):
        read_row({"prompt": "x"}, columns)


@pytest.mark.parametrize("prompt", [None, 7, [], ["text"], [{"role": "user"}], [{"content": "x"}]])
def test_a_prompt_that_is_neither_text_nor_a_chat_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match="column 'prompt'"):
        read({"prompt": prompt, "answer": "y"})


def test_keys_that_arrow_made_up_are_left_out_of_messages() -> None:
    padded = [{"role": "user", "content": "hi", "name": None}]
    assert read({"prompt": padded})[0] == ({"role": "user", "content": "hi"},)
