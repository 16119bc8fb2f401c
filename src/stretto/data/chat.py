"""From a row's prompt to what the model reads: the chat template and the tokenizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.data.columns import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_chat(prompt: str | Messages, chat: bool | None, system: str | None) -> Messages | None:
    """The messages that `prompt` is rendered from, `system` first; None when it stays raw text.

    `chat` is `data.chat`: True wraps text as one user message, None leaves it raw. Raises ValueError for a chat where
    `chat` is False, for one that brings a system message although `system` is given, and for raw text with `system`.
    """
    if isinstance(prompt, str):
        if not chat and system is not None:
            raise ValueError(
                "data.system needs a chat, but the prompt is text; set data.chat = true, or remove data.system"
            )
        if not chat:
            return None
        messages: Messages = ({"role": "user", "content": prompt},)
    else:
        messages = prompt
    if chat is False:
        raise ValueError(
            "the prompt is a list of chat messages, which data.chat = false does not allow; remove that key"
        )
    if messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message; a prompt is the chat up to the answer")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("the prompt has a system message of its own; remove it from the source, or remove data.system")
    return ({"role": "system", "content": system}, *messages)


def check_template_args(tokenizer: PreTrainedTokenizerBase, args: Mapping[str, Any]) -> None:
    """Raise ValueError for a name in `data.template_args` that the model's template does not read.

    So is one that the tokenizer takes for itself, as `tokenize`: it would change what the loop relies on.
    """
    if not args or not tokenizer.chat_template:
        return
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
    template = tokenizer.get_chat_template(tools=args.get("tools"))
    words = set(re.findall(r"\w+", template))
    for name in args:
        if name in taken:
            raise ValueError(f"data.template_args cannot set {name}: it is the tokenizer's, not the template's")
        if name not in words:
            raise ValueError(f"data.template_args sets {name}, which the model's chat template never reads; remove it")


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], args: Mapping[str, Any] | None = None
) -> str:
    """The chat in the model's own template, up to where the assistant's answer begins.

    `args` are variables for the template (`data.template_args`).

    Raises ValueError when the model has no template, or when its template refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError(
            "the model has no chat template, so it cannot read chat messages; give text prompts (without data.chat), "
            "or a model with a template"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **(args or {}))
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses the messages: {error}") from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> tuple[int, ...]:
    """Token ids of `text`. `special` adds the tokenizer's special tokens: for raw text, as a chat brings its own.

    Raises ValueError for text that is not valid Unicode.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the prompt holds half of a surrogate pair (a character cut in two), which no tokenizer takes")
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
