"""Qwen3-VL: a vision tower, whole on every rank, before a language model like Qwen3's.

Features of some vision layers (deepstack) pass mergers of their own into the first layers of the language model.
"""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import attention, embedding, final_norm, gated_mlp, head_copy, heads, norms
from stretto.models.language import Piece, Row, WeightMap, layers, row
from stretto.models.registry import family

_TEXT = "model.language_model."
_VISION = "model.visual."


@family("Qwen3VLConfig")
def qwen3_vl(c: Any) -> WeightMap:
    """Qwen3VLForConditionalGeneration. Megatron-Core has no such model."""
    text, vision = c.text_config, c.vision_config
    layer = [
        *norms(),
        *attention(bias=text.attention_bias, output_bias=text.attention_bias, qk_norm=True),
        *gated_mlp(),
    ]
    return WeightMap(
        family="qwen3_vl",
        sizes={"v": text.vocab_size, "f": text.intermediate_size, **heads(text), **vision_sizes(vision)},
        rows=(
            *vision_tower(vision),
            *embedding(tied=c.tie_word_embeddings, prefix=_TEXT),
            *layers(text.num_hidden_layers, layer, prefix=_TEXT + "layers.{layer}."),
            final_norm(prefix=_TEXT),
        ),
        layer_count=text.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron=None,
        spelled={
            "vllm": {_TEXT: "language_model.model.", "lm_head.": "language_model.lm_head.", _VISION: "visual."},
            "sglang": {_TEXT: "model.", _VISION: "visual.", "attn.qkv.": "attn.qkv_proj."},
        },
    )


def vision_sizes(vision: Any) -> dict[str, int]:
    """Sizes of the tower: width, MLP, position table, a patch's channels, frames and side, patches merged, output."""
    return {
        "width": vision.hidden_size,
        "mlp": vision.intermediate_size,
        "positions": vision.num_position_embeddings,
        "channels": vision.in_channels,
        "frames": vision.temporal_patch_size,
        "side": vision.patch_size,
        "merged": vision.spatial_merge_size**2,
        "out": vision.out_hidden_size,
    }


def vision_tower(vision: Any) -> list[Row]:
    """Patch and position embeddings, blocks, and the mergers."""
    block = [
        *_whole("norm1", "width"),
        *_whole("attn.qkv", "(3 width) width"),
        *_whole("attn.proj", "width width"),
        *_whole("norm2", "width"),
        *_whole("mlp.linear_fc1", "mlp width"),
        *_whole("mlp.linear_fc2", "width mlp"),
    ]
    deep = len(vision.deepstack_visual_indexes)
    return [
        *_whole(f"{_VISION}patch_embed.proj", "width channels frames side side"),
        row(Piece(f"{_VISION}pos_embed.weight", "positions width"), cut=False, stage="first"),
        *layers(vision.depth, block, prefix=_VISION + "blocks.{layer}.", stage="first"),
        *_merger(f"{_VISION}merger.", "width"),
        *layers(deep, _merger("", "(merged width)"), prefix=_VISION + "deepstack_merger_list.{layer}.", stage="first"),
    ]


def _merger(prefix: str, norm: str) -> list[Row]:
    return [
        *_whole(f"{prefix}norm", norm),
        *_whole(f"{prefix}linear_fc1", "(merged width) (merged width)"),
        *_whole(f"{prefix}linear_fc2", "out (merged width)"),
    ]


def _whole(module: str, axes: str) -> list[Row]:
    """Weight and bias of a module of the tower; the bias is as long as the weight's first axis."""
    weight = Piece(f"{module}.weight", axes)
    bias = Piece(f"{module}.bias", f"({' '.join(weight.factored[0])})")
    return [row(weight, cut=False, stage="first"), row(bias, cut=False, stage="first")]
