"""The source of a map file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from stretto.models.scaffold.draft import Draft, Layer
from stretto.models.scaffold.parts import BLOCKS

_WIDTH = 120
_MEGATRON_READY = (
    "Every row has a Megatron column, but whether Megatron-Core computes what this model does is not in names and",
    "shapes: give the TransformerConfig settings it needs ({} if it computes as Llama), then `stretto check` it.",
)


def source_of(draft: Draft) -> str:
    """A Python file that declares the map, in the way of the families that come with Stretto."""
    config, model = draft.described.config, draft.described.architecture
    nested = config.get_text_config() is not config
    body = [*(["    c = config.get_text_config()"] if nested else []), *_layers(draft), *_map(draft)]
    text, name = "\n".join(body), re.sub(r"\W", "_", config.model_type)
    return "\n".join(
        [
            f'"""{model}: begun by `stretto new-model` from names, shapes and the configuration."""',
            "",
            "from __future__ import annotations",
            "",
            "from typing import Any",
            "",
            *_imports(text),
            "from stretto.models.registry import family",
            "",
            "",
            f'@family("{type(config).__name__}")',
            f"def {name}({'config' if nested else 'c'}: Any) -> WeightMap:",
            f'    """{model}."""',
            text,
            "",
        ]
    )


def _imports(text: str) -> Iterator[str]:
    def used(*names: str) -> str:
        return ", ".join(name for name in names if re.search(rf"\b{name}\(", text))

    if blocks := used(*sorted([*BLOCKS, "head_copy", "heads"])):
        yield from _wrapped(f"from stretto.models.blocks import ({blocks})", 0, bare=True)
    yield f"from stretto.models.language import {used('Held', 'Piece', 'WeightMap', 'layers', 'row')}"


def _layers(draft: Draft) -> Iterator[str]:
    for name, layer in zip(_names(draft), draft.layers, strict=True):
        texts = [_with_keys(part.text, draft.described.config.get_text_config()) for part in layer.parts]
        yield from _wrapped(f"{name} = [{', '.join(texts)}]", 4)


def _names(draft: Draft) -> list[str]:
    return ["layer"] if len(draft.layers) == 1 else [f"layer_{index}" for index in range(len(draft.layers))]


def _map(draft: Draft) -> Iterator[str]:
    c = draft.described.config.get_text_config()
    behind = [part for part in draft.outside if part.rows[0].stage == "last" and not part.rows[0].tied]
    rows = [_with_keys(part.text, c) for part in draft.outside if part not in behind]
    prefix = "" if draft.prefix == "model.layers.{layer}." else f', prefix="{draft.prefix}"'
    for name, layer in zip(_names(draft), draft.layers, strict=True):
        rows.append(f"*layers({_numbers(layer, c)}, {name}{prefix})")
    rows += [_with_keys(part.text, c) for part in behind]
    yield "    return WeightMap("
    yield f'        family="{draft.described.config.model_type}",'
    yield from _wrapped(f"sizes={{{', '.join(_sizes(draft))}}},", 8)
    yield from _wrapped(f"rows=({', '.join(rows)}{',' if len(rows) == 1 else ''}),", 8)
    yield "        layer_count=c.num_hidden_layers," if hasattr(c, "num_hidden_layers") else "        layer_count=0,"
    if "lm_head.weight" in draft.described.tied:
        yield f"        dropped={_with_keys('head_copy(tied=True)', c)},"
    yield from _megatron(draft)
    if draft.unresolved:
        yield "        # Give each of these a row, then take it out; until then the map refuses to be used."
        yield "        unresolved=("
        yield from (f'            "{one}",' for one in draft.unresolved)
        yield "        ),"
    yield "    )"


def _sizes(draft: Draft) -> Iterator[str]:
    used = {factor for one in draft.rows for piece in one.pieces for factor in piece.factors}
    for factor, expression in draft.sizes.expressions.items():
        if factor in used:
            yield f'"{factor}": {expression}'
    if draft.sizes.grouped and used & set("hgqd"):
        yield "**heads(c)"


def _megatron(draft: Draft) -> Iterator[str]:
    lacking = draft.without_megatron
    if lacking:
        yield "        # Rows without a Megatron column: give them one, or leave the model to FSDP2."
        yield from (f"        #   {name}" for name in lacking)
    elif not draft.unresolved:
        yield from (f"        # {line}" for line in _MEGATRON_READY)
    yield "        megatron=None,"


def _with_keys(text: str, c: Any) -> str:
    """Settings that a key of the configuration gives are read from it."""
    if f"tied={getattr(c, 'tie_word_embeddings', None)}" in text and "(tied" in text:
        text = text.replace(f"tied={c.tie_word_embeddings}", "tied=c.tie_word_embeddings")
    if text.startswith("*attention(") and getattr(c, "attention_bias", None) is True:
        text = re.sub(r"bias=True", "bias=c.attention_bias", text)
    return text


def _numbers(layer: Layer, c: Any) -> str:
    """The numbers of a kind of layer, from the configuration where a key of it tells them."""
    count, numbers = c.num_hidden_layers, layer.numbers
    if len(numbers) == count:
        return "c.num_hidden_layers"
    types = getattr(c, "layer_types", None) or ()
    if len(types) == count:
        mine = {types[number] for number in numbers}
        if [number for number in range(count) if types[number] in mine] == list(numbers):
            return f"[n for n, kind in enumerate(c.layer_types) if kind in {sorted(mine)}]".replace("'", '"')
    first = getattr(c, "first_k_dense_replace", None)
    if first and numbers == tuple(range(first)):
        return "range(c.first_k_dense_replace)"
    if first and numbers == tuple(range(first, count)):
        return "range(c.first_k_dense_replace, c.num_hidden_layers)"
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"range({numbers[0]}, {numbers[-1] + 1})"
    return repr(list(numbers))


def _wrapped(text: str, indent: int, *, bare: bool = False) -> list[str]:
    """`text` on one line when it fits (without brackets when `bare`), else its outermost parts on a line each."""
    whole = re.sub(r"\((.*)\)", r"\1", text) if bare else text
    if indent + len(whole) <= _WIDTH:
        return [" " * indent + whole]
    opened = min(place for bracket in "([{" if (place := text.find(bracket)) >= 0)
    closed = max(text.rfind(bracket) for bracket in ")]}")
    lines = [" " * indent + text[: opened + 1]]
    for one in _split(text[opened + 1 : closed]):
        lines += _wrapped(f"{one},", indent + 4)
    return [*lines, " " * indent + text[closed:]]


def _split(text: str) -> Iterator[str]:
    """The parts of a comma-separated text, commas inside of brackets and quotes apart."""
    depth, quoted, start = 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                yield text[start:place].strip()
                start = place + 1
    if rest := text[start:].strip():
        yield rest
