"""Chat templates, special tokens and the system message."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from stretto.data.chat import as_chat, check_template_args, encode, render_chat

USER = {"role": "user", "content": "3 + 4 ="}


def test_ids_of_a_rendered_chat_are_those_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render_chat(tokenizer, [USER])
    ids = encode(tokenizer, text, special=False)
    direct = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert text == "<s>user 3 + 4 =</s><s>assistant "
    assert list(ids) == direct
    assert ids.count(tokenizer.bos_token_id) == 2, "the template's own, none added"


def test_raw_text_gets_the_tokenizers_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tokenizer, "3 + 4 =", special=True)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]).replace(" ", "") == "3+4="


def test_chat_true_wraps_text_and_the_system_message_comes_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert as_chat("3 + 4 =", True, None) == (USER,)
    assert as_chat("3 + 4 =", True, "Be brief.") == (system, USER)
    assert as_chat((USER,), None, "Be brief.") == (system, USER)
    assert as_chat("3 + 4 =", None, None) is None
    assert as_chat("3 + 4 =", False, None) is None


def test_prompts_that_contradict_the_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.chat = false does not allow"):
        as_chat((USER,), False, None)
    with pytest.raises(ValueError, match="system message of its own"):
        as_chat(({"role": "system", "content": "a"}, USER), None, "b")
    with pytest.raises(ValueError, match=r"data\.system needs a chat"):
        as_chat("text", None, "b")


def test_a_prompt_with_its_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="ends with an assistant message"):
        as_chat((USER, {"role": "assistant", "content": "7"}), None, None)


def test_a_model_without_a_template_is_refused(tokenizer_without_template: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(tokenizer_without_template, [USER])


def test_what_the_template_objects_to_is_said(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="refuses the messages: only user, system and assistant"):
        render_chat(tokenizer, [{"role": "critic", "content": "no"}])


def test_text_with_a_character_cut_in_two_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        encode(tokenizer, "ok \ud83d", special=True)


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "conversation", "chat_template", "return_dict"])
def test_what_the_tokenizer_decides_is_no_variable_of_the_template(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    with pytest.raises(ValueError, match=rf"data\.template_args cannot set {name}"):
        check_template_args(tokenizer, {name: True})
