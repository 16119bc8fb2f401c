"""From the run file to tokenised prompts, with the held-out ones set apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from stretto.data.chat import as_chat, check_template_args, encode, render_chat
from stretto.data.columns import Columns, find_columns, read_row
from stretto.data.procedural import eval_args, is_procedural
from stretto.data.sources import read_rows
from stretto.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.config import RunConfig
    from stretto.config.sections import DataConfig


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to train on and to evaluate on; no text is in both.

    `dropped` counts rows that are in neither: ``over_long``, ``in_heldout`` (same text as a held-out prompt), and
    ``eval_over_long`` (rows of eval.source).
    """

    train: list[Prompt]
    heldout: list[Prompt]
    dropped: dict[str, int]


def load_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Read, render, tokenise and split the prompts of a run.

    data.limit cuts the rows of data.source before anything else. With data.heldout, the held-out prompts are a function
    of the seed and the set of distinct texts alone (:func:`split_heldout`); with eval.source they are its rows, and
    training loses the rows that share their text.
    eval.limit cuts what is evaluated, not what is kept from training. Raises ValueError for whatever is wrong with
    the sources, and when nothing is left to train on.
    """
    data = config.data
    check_template_args(tokenizer, data.template_args)
    rows = read_rows(data.source, data.split, data.args, config.seed, data.subset)[: data.limit]
    prompts, over_long = _prepare(data.source, rows, data, tokenizer)
    dropped = {"over_long": over_long, "in_heldout": 0, "eval_over_long": 0}
    if config.eval.source is None:
        train, heldout = split_heldout(prompts, data.heldout, config.seed)
        dropped["in_heldout"] = len(prompts) - len(train) - len(heldout)
    else:
        heldout, dropped["eval_over_long"] = _read_eval(config, tokenizer)
        train = _without(prompts, heldout)
        dropped["in_heldout"] = len(prompts) - len(train)
    if not train:
        raise ValueError(
            f"nothing is left to train on: {data.source} has {len(rows)} rows, of which {over_long} are over "
            f"data.max_prompt_tokens and {len(prompts)} have the text of a held-out prompt"
        )
    return PromptSet(train, heldout[: config.eval.limit], dropped)


def split_heldout(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held-out): `count` distinct texts set aside, each with its first row; their other rows are in neither.

    The held-out texts are those with the smallest hash keyed by `seed`. So reordering or repeating rows changes
    nothing, and each of a source's new texts displaces at most one held-out text into training. The held-out prompts
    come in the order of their hashes, hence any first few of them are as random a choice as all.
    Raises ValueError when a `count` above 0 leaves no text to train on.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    if count and count >= len(first):
        raise ValueError(
            f"data.heldout = {count} leaves nothing to train on: the source has {len(first)} distinct prompts of "
            "allowed length; set it lower"
        )
    key = seed.to_bytes(8, "little")
    texts = sorted(first, key=lambda text: blake2b(text.encode(), key=key, digest_size=16).digest())
    heldout = [first[text] for text in texts[:count]]
    return _without(prompts, heldout), heldout


def _without(prompts: Iterable[Prompt], heldout: Iterable[Prompt]) -> list[Prompt]:
    texts = {prompt.text for prompt in heldout}
    return [prompt for prompt in prompts if prompt.text not in texts]


def _read_eval(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], int]:
    data, source = config.data, config.eval.source
    assert source is not None
    args = eval_args(source, data.source, data.args, config.seed)
    rows = read_rows(source, config.eval.split or data.split, args, config.seed, config.eval.subset or data.subset)
    prompts, over_long = _prepare(source, rows, data, tokenizer)
    if not prompts:
        raise ValueError(f"eval.source {source} has no prompt of at most {data.max_prompt_tokens} tokens")
    return prompts, over_long


def _prepare(
    source: str, rows: Sequence[dict[str, Any]], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], int]:
    """The prompts of a source's rows, and how many were dropped because they are too long."""
    procedural = is_procedural(source)
    format, prompt_key, label_key = (
        ("stretto", None, None) if procedural else (data.format, data.prompt_key, data.label_key)
    )
    try:
        columns = find_columns(rows[0], format, prompt_key, label_key)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    prompts = []
    for number, row in enumerate(rows):
        try:
            prompts.append(_to_prompt(number, row, columns, data, tokenizer))
        except ValueError as error:
            raise ValueError(f"{source}, row {number} (the first is 0): {error}") from error
    kept = [prompt for prompt in prompts if prompt is not None]
    return kept, len(prompts) - len(kept)


def _to_prompt(
    number: int, row: dict[str, Any], columns: Columns, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Prompt | None:
    """One row as a prompt; None when it is over-long and data.over_long is "drop"."""
    prompt, fields = read_row(row, columns)
    messages = as_chat(prompt, data.chat, data.system)
    if messages is None and data.template_args:
        raise ValueError(
            "data.template_args needs a chat, but the prompt is text; set data.chat = true, or remove that key"
        )
    text = prompt if messages is None else render_chat(tokenizer, messages, data.template_args)
    assert isinstance(text, str)
    ids = encode(tokenizer, text, special=messages is None)
    if not ids:
        raise ValueError("the prompt is empty: it has no tokens")
    if len(ids) > data.max_prompt_tokens:
        if data.over_long == "drop":
            return None
        raise ValueError(
            f"the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {data.max_prompt_tokens}; "
            'raise that, or leave such rows out with data.over_long = "drop"'
        )
    # Text stays text to the rewards, also where data.chat wraps it for the model.
    return Prompt(ids, text, number, fields, None if isinstance(prompt, str) else messages)
