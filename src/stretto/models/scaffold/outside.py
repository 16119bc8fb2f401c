"""The parts outside of layers: embedding, head, last norm."""

from __future__ import annotations

import re

from stretto.models.description import Description
from stretto.models.scaffold.factors import NORM, Sizes
from stretto.models.scaffold.layer import rows_by_shape
from stretto.models.scaffold.parts import Pool, call, row_text

_EMBEDDING = re.compile(r"(embed_tokens|embed_in|word_embeddings|wte|embeddings?|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(lm_head|embed_out|output)\.weight$")
_POSITIONS = re.compile(r"(wpe|embed_positions|position_embeddings)\.weight$")


def outside_parts(pool: Pool, described: Description, sizes: Sizes) -> None:
    """Take the embedding, the head (tied or not), the last norm, and what shapes tell of the others."""
    _embedding(pool, described)
    _last_norm(pool, described.centred)
    for name in [name for name in pool.files if _POSITIONS.search(name)]:
        pool.take(row_text(name, "p h", megatron="embedding.position_embeddings.weight", stage="first"))
    rows_by_shape(pool, sizes)


def _embedding(pool: Pool, described: Description) -> None:
    tied = set(described.tied.values())
    found = [name for name in pool.files if _EMBEDDING.search(name)]
    heads = [name for name in pool.files if _HEAD.search(name)]
    if len(found) != 1 or len(heads) != (found[0] not in tied):
        return
    (name,) = found
    prefix, head = name.removesuffix("embed_tokens.weight"), heads[0] if heads else None
    if prefix != name:
        other = {"prefix": prefix if prefix != "model." else None, "head": head if head != "lm_head.weight" else None}
        pool.take(call("embedding", tied=not heads, **other))
        return
    first = row_text(name, "v h", megatron="embedding.word_embeddings.weight", stage="first")
    last = row_text(head or name, "v h", megatron="output_layer.weight", stage="last", tied=None if head else True)
    pool.take(first, last)


def _last_norm(pool: Pool, centred: frozenset[str]) -> None:
    found = [name for name in pool.files if NORM.search(name) and name.endswith(".weight")]
    if len(found) != 1:
        return
    (name,) = found
    add, prefix = 1.0 if name in centred else None, name.removesuffix("norm.weight")
    if name == f"{prefix}norm.weight" and (not prefix or prefix.endswith(".")):
        pool.take(call("final_norm", prefix=prefix if prefix != "model." else None, add=add))
    else:
        pool.take(row_text(name, "h", megatron="decoder.final_layernorm.weight", stage="last"))
    bias = name.removesuffix("weight") + "bias"
    pool.take(row_text(bias, "h", megatron="decoder.final_layernorm.bias", stage="last"))
