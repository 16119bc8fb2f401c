"""A tiny word tokenizer with a chat template, and run files around a source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from stretto.config import RunConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('only user, system and assistant') }}{% endif %}"
    "<s>{{ m.role }} {{ m.content | upper if loud else m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Single characters are tokens; raw text gets <s> in front, as many real models do."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_without_template() -> PreTrainedTokenizerFast:
    return make_tokenizer(None)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and returns the path."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """A run file around a source, with keys of [data] and, as `eval`, of [eval]."""

    def make(source: str, *, seed: int = 0, eval: dict[str, Any] | None = None, **data: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "seed": seed,
                "model": {"path": "unused"},
                "data": {"source": source, **data},
                "reward": {"functions": ["unused.py:unused"]},
                "eval": eval or {},
            }
        )

    return make
