"""Building a rank's part of the model: Megatron's GPTModel, one for each of its chunks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from stretto.sync.parallel import MegatronSizes
from stretto.trainers.megatron.attention import CausalAttention
from stretto.trainers.megatron.latent import use_whole_projections
from stretto.trainers.megatron.norm import LatentNorm, RMSNorm
from stretto.trainers.megatron.provider import (
    SCALE_EMBEDDINGS,
    is_latent,
    padded_vocabulary,
    transformer_config,
)
from stretto.trainers.megatron.rotary import inverse_frequencies


def build_model(
    hf_config: Any,
    sizes: MegatronSizes,
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> list[GPTModel]:
    """This rank's chunks of the model, in the order of their virtual stages (one when vpp is 1), in training mode.

    `parallel.start` must have been called with the same `sizes`. All chunks share one config (`model.config`). A tied
    head at pp > 1 is a parameter of the last stage, kept equal to the embedding by Megatron's embedding group. The
    last stage gives logits (B, S, padded vocabulary / tp) in `dtype`, of this TP rank's rows of the vocabulary. The
    keywords are those of `transformer_config`.

    Raises ValueError for what Megatron-Core cannot build.
    """
    config = transformer_config(
        hf_config,
        sizes,
        options,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    chunks = build_chunks(hf_config, sizes, config, device)
    for model in chunks:
        if options.get(SCALE_EMBEDDINGS) and model.pre_process:
            _scale_embeddings(model, hf_config.hidden_size**0.5)
    return chunks


def build_chunks(
    hf_config: Any, sizes: MegatronSizes, config: TransformerConfig, device: torch.device
) -> list[GPTModel]:
    """As `build_model`, with a config that is there already; embeddings are not scaled."""
    _check_engine(hf_config, sizes)
    _mend_router()
    frequencies = inverse_frequencies(hf_config)
    with _same_draws():
        chunks = [_chunk(hf_config, sizes, config, chunk).to(device) for chunk in range(sizes.vpp)]
    for model in chunks:
        _set_frequencies(model, frequencies.to(device))
        _set_experts_apart(model)
    return chunks


@contextmanager
def _same_draws() -> Iterator[None]:
    """Draw first weights alike on every rank, since replicas must be equal; the CPU's generator is left as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _check_engine(hf_config: Any, sizes: MegatronSizes) -> None:
    if not sizes.te:
        return
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("megatron: te needs Transformer Engine, which is not installed; set te to false")
    if is_latent(hf_config) and hf_config.rms_norm_eps != LatentNorm.EPSILON:
        raise ValueError(
            f"megatron: with te the latents' norms have the config's epsilon and not {LatentNorm.EPSILON:g}"
        )


def _mend_router() -> None:
    """Megatron-Core 0.16 asks for this name, which it defines only where Transformer Engine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[reportAttributeAccessIssue]


def _chunk(hf_config: Any, sizes: MegatronSizes, config: TransformerConfig, chunk: int) -> GPTModel:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    virtual = chunk if sizes.vpp > 1 else None
    return GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, sizes, virtual),  # type: ignore[reportArgumentType]
        vocab_size=padded_vocabulary(hf_config.vocab_size, sizes),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == sizes.pp - 1 and chunk == sizes.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=virtual,
    )


def _block_spec(config: TransformerConfig, sizes: MegatronSizes, virtual: int | None) -> TransformerBlockSubmodules:
    """Megatron's spec of the chunk's layers; not run with Transformer Engine, whose parts stay its own."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=sizes.te, normalization="RMSNorm", vp_stage=virtual
    )
    if not sizes.te:
        _use_our_parts(spec)
    return spec


def _use_our_parts(spec: Any) -> None:
    """Put our norms and attention where Megatron's local layers have theirs."""
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        _use_norm(layer.submodules, RMSNorm)
        if hasattr(attention, "kv_layernorm"):
            _use_norm(attention, LatentNorm)
            use_whole_projections(attention)
        else:
            _use_norm(attention, RMSNorm)


def _use_norm(parts: Any, norm: type[RMSNorm]) -> None:
    for name, module in vars(parts).items():
        if name.endswith("layernorm") and module not in (None, IdentityOp):
            setattr(parts, name, norm)


def _set_frequencies(model: GPTModel, frequencies: Tensor) -> None:
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = frequencies


def _set_experts_apart(model: GPTModel) -> None:
    """Have the gradients of experts summed over the ranks with the same ones.

    Megatron marks them so only at ep > 1; unmarked they are summed as those of other weights are, which is wrong when
    etp is not tp.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[reportAttributeAccessIssue]


def _scale_embeddings(model: GPTModel, scale: float) -> None:
    """Multiply the embeddings by `scale` rounded to their dtype (Gemma), before the first layer."""

    def scaled(_: torch.nn.Module, __: Any, embeddings: Tensor) -> Tensor:
        return embeddings * torch.tensor(scale, dtype=embeddings.dtype, device=embeddings.device)

    model.embedding.register_forward_hook(scaled)
