"""The model as the loss sees it: log-probs and entropies of chosen tokens, never the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.data.batching import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Statistics = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [N, V], targets [N] and temperatures [N] to log-probs [N] and entropies [N]."""

# Settings under which a model changes its logits after the head, which `Policy` would not see.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A causal language model whose forward pass ends in log-probs.

    It is one module, and the root of the sharding, so that the head's weight is gathered with the embedding's.
    """

    def __init__(self, model: PreTrainedModel, logit_chunk_tokens: int, *, compiled: bool = False):
        super().__init__()
        changed = [name for name in _LOGIT_CHANGES if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if changed:
            raise ValueError(
                f"{model.config.model_type} models with {changed[0]} are not supported by the fsdp trainer"
            )
        self.model = model
        self.logit_chunk_tokens = logit_chunk_tokens
        self._statistics: Statistics = torch.compile(_statistics, dynamic=True) if compiled else _statistics

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the micro-batch's targets at their temperature, and entropies [N] of those distributions."""
        base: Any = self.model.base_model
        hidden_BLD = base(
            input_ids=micro.input_ids_BL,
            position_ids=micro.position_ids_BL,
            attention_mask=self.attention_mask(micro),
            use_cache=False,
        ).last_hidden_state
        hidden_ND = hidden_BLD.flatten(0, 1)[micro.predict_N]
        size = self.logit_chunk_tokens
        parts = [
            self._head(
                hidden_ND[i : i + size],
                micro.target_N[i : i + size],
                micro.temperature_N[i : i + size],
                len(hidden_ND) > size,
            )
            for i in range(0, max(1, len(hidden_ND)), size)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def attention_mask(self, micro: MicroBatch) -> Tensor | None:
        """[B, 1, L, L] as numbers to add to the scores: given yes and no, every layer would make and keep its own."""
        if micro.attention_BLL is None:
            return None
        embedding: Any = self.model.get_input_embeddings()
        mask = torch.zeros(micro.attention_BLL.shape, dtype=embedding.weight.dtype, device=micro.attention_BLL.device)
        return mask.masked_fill_(~micro.attention_BLL, -torch.inf)[:, None]

    def _head(
        self, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        if recompute and torch.is_grad_enabled():
            # Only the hidden states are kept: a chunk's logits are computed again in the backward pass.
            return checkpoint(
                _token_logprobs,
                self.model.get_output_embeddings(),
                self._statistics,
                hidden_ND,
                target_N,
                temperature_N,
                use_reentrant=False,
            )  # type: ignore[return-value]
        head = self.model.get_output_embeddings()
        return _token_logprobs(head, self._statistics, hidden_ND, target_N, temperature_N)


def _token_logprobs(
    head: Any, statistics: Statistics, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    return statistics(head(hidden_ND), target_N, temperature_N)


def _statistics(logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature_N[:, None]
    total_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - total_N
    entropies_N = total_N - ((logits_NV - total_N[:, None]).exp() * logits_NV).sum(-1)
    return logprobs_N, entropies_N
