"""The reward of the addition example."""

from __future__ import annotations

from typing import Any


def exact(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the first line of the completion, stripped, is exactly the answer, else 0.0.

    The signature is TRL's: columns of the source arrive as keyword arguments, one value per completion.
    """
    return [float(text.partition("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]
