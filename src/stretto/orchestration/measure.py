"""The metrics of a step, over all ranks."""

from __future__ import annotations

import re
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stretto.orchestration.queue import SampleQueue
from stretto.orchestration.rollouts import Scored
from stretto.telemetry.metrics import mean_std
from stretto.types import FinishReason, Score
from stretto.world import World


class Facts(NamedTuple):
    """What the metrics of a step take of a sample; `failure` is the kind of it."""

    reward: float | None
    parts: Mapping[str, float]
    length: int
    truncated: bool
    failure: str | None


def facts(score: Score, length: int, reason: FinishReason) -> Facts:
    """Those of a sample of `length` response tokens."""
    kind = score.failure.kind if score.failure else None
    return Facts(score.reward, dict(score.parts), length, reason is FinishReason.LENGTH, kind)


def facts_of(one: Scored) -> Facts:
    """Those of a scored rollout."""
    return facts(one.score, one.rollout.response_tokens, one.rollout.finish_reason)


def sample_metrics(samples: Sequence[Facts], constant_groups: int, groups: int, world: World) -> dict[str, float]:
    """reward/* and rollout/* of this step's samples. All ranks call together."""
    rows = [row for part in world.gather(list(samples)) for row in part]
    constant, total = world.sum([constant_groups, groups])
    rewards = [row.reward for row in rows if row.reward is not None]
    failures = Counter(row.failure for row in rows if row.failure)
    metrics = {
        "reward/failed_share": sum(failures.values()) / len(rows),
        "reward/zero_variance_share": constant / total if total else 0.0,
        "rollout/response_length_mean": sum(row.length for row in rows) / len(rows),
        "rollout/response_length_max": float(max(row.length for row in rows)),
        "rollout/truncated_share": sum(row.truncated for row in rows) / len(rows),
    }
    if rewards:
        metrics["reward/mean"], metrics["reward/std"] = mean_std(rewards)
    for name in sorted({name for row in rows for name in row.parts}):
        metrics[f"reward/part/{name}"] = mean_std([row.parts[name] for row in rows if name in row.parts])[0]
    return metrics | {f"reward/failed/{kind}": count / len(rows) for kind, count in failures.items()}


def token_metrics(queue: SampleQueue[Any], world: World) -> dict[str, float]:
    """tokens/*: running totals over all ranks."""
    tokens = queue.tokens
    values = world.sum([tokens.generated, tokens.trained, tokens.dropped, queue.in_flight_tokens()])
    names = ("tokens/generated", "tokens/trained", "tokens/dropped", "tokens/in_flight")
    return {name: int(value) for name, value in zip(names, values, strict=True)}


def rate_metrics(times: Mapping[str, float], new_tokens: float, trained_tokens: float) -> dict[str, float]:
    """Tokens per second of the step and of its rollout and training phases."""
    rates = {
        "tokens/per_s": ("time/step", new_tokens),
        "rollout/tokens_per_s": ("time/rollout", new_tokens),
        "train/tokens_per_s": ("time/train", trained_tokens),
    }
    return {name: tokens / times[phase] for name, (phase, tokens) in rates.items() if times.get(phase)}


def peak_memory(world: World) -> float:
    """The most bytes that any rank had: allocated device memory on CUDA, resident memory on CPU."""
    if world.device.type == "cuda":
        return world.max([torch.cuda.max_memory_allocated()])[0]
    return world.max([_peak_resident()])[0]


def _peak_resident() -> int:
    """Bytes; from /proc where there is one, since `ru_maxrss` of a child begins at what its parent had."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
