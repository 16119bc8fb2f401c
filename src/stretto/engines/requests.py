"""Which requests can be served."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.types import Request, Sampling


def check_requests(requests: Sequence[Request], *, vocabulary: int, max_length: int) -> None:
    """Raise ValueError naming the first request that cannot be served, and why."""
    if len({request.id for request in requests}) != len(requests):
        raise ValueError("two requests in flight have the same id")
    for request in requests:
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not length or not request.seeds or new < 1:
            raise ValueError(f"request {request.id} needs a prompt, a seed a sample and max_new_tokens >= 1")
        if length + new > max_length:
            raise ValueError(
                f"request {request.id}: {length} prompt tokens + {new} new ones are more than the model's "
                f"{max_length}; lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise ValueError(f"request {request.id} has token ids outside the vocabulary of {vocabulary}")
        if not 0 <= min(request.seeds) <= max(request.seeds) < 2**64:
            raise ValueError(f"request {request.id} has a seed outside 0 ... 2**64 - 1")
        wrong = _wrong_sampling(request.sampling)
        if wrong:
            raise ValueError(f"request {request.id}: {wrong}")


def _wrong_sampling(sampling: Sampling) -> str | None:
    """What is wrong with the settings. Each filter must leave at least the likeliest token."""
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature is {sampling.temperature}; it must be 0 (greedy) or a positive number"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must lie in (0, 1]"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must be 0 (off) or positive"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must lie in [0, 1]"
    if "" in sampling.stop:
        return "an empty stop string would never end a response; leave it out"
    return None
