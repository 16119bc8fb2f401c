"""How the losses of tokens become one number. To add one: write its function and its row in ``AGGREGATIONS``.

Each sequence gets the weight that every one of its loss tokens carries, so that ``loss = sum_t w_t * l_t`` over all
micro-batches and ranks. The weights depend on totals alone, hence the loss does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Totals(NamedTuple):
    """Loss tokens and sequences of an optimizer step over all ranks, and the constant that a length is replaced by."""

    tokens: int
    sequences: int
    constant_length: int | None


def token_mean(length: int, totals: Totals) -> float:
    """``1 / tokens``: every token counts the same. Yu et al. 2025, DAPO (arXiv:2503.14476), section 3.3, eq. 12."""
    return 1 / totals.tokens


def sequence_mean(length: int, totals: Totals) -> float:
    """``1 / (sequences * length)``: every sequence counts the same. Shao et al. 2024 (arXiv:2402.03300), eq. 3."""
    return 1 / (totals.sequences * length)


def constant_length(length: int, totals: Totals) -> float:
    """``1 / (sequences * constant)``. Liu et al. 2025, Dr. GRPO (arXiv:2503.20783), section 3.2 and its listing 1."""
    if totals.constant_length is None:
        raise ValueError('aggregation "constant_length" needs algorithm.constant_length')
    return 1 / (totals.sequences * totals.constant_length)


AGGREGATIONS: dict[str, Callable[[int, Totals], float]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
}


def token_weights(
    name: str,
    lengths: Sequence[int],
    *,
    total_tokens: int,
    total_sequences: int,
    constant_length: int | None = None,
) -> list[float]:
    """The weight of each loss token of each sequence; a sequence without loss tokens has weight 0.

    Args:
        name: a key of ``AGGREGATIONS``.
        lengths: loss tokens of each of this rank's sequences.
        total_tokens: loss tokens of the optimizer step, over all ranks.
        total_sequences: sequences of the optimizer step, over all ranks.
        constant_length: tokens; read by "constant_length" alone, which raises ValueError without it.
    """
    totals = Totals(total_tokens, total_sequences, constant_length)
    return [AGGREGATIONS[name](length, totals) if length else 0.0 for length in lengths]
