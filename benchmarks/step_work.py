"""The step that every system of step.py makes: batch shape, checkpoint, prompts, and how its seconds are told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo import TINY, write_checkpoint
from rollout import QWEN3_06B

PHASES = ("rollout", "reward", "train", "sync")
MODEL = "model"


@dataclass(frozen=True)
class Work:
    """One step: `prompts` x `samples` responses of exactly `new` tokens to prompts of `prompt` tokens.

    `steps` of them are timed after `warm_up` others.
    """

    prompts: int
    samples: int
    prompt: int
    new: int
    steps: int
    warm_up: int

    @property
    def responses(self) -> int:
        """Samples of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Response tokens of a step."""
        return self.responses * self.new

    def texts(self, seed: int) -> list[str]:
        """Prompts for all steps, `prompt` words each of which is a token; another `seed` gives others."""
        count = self.prompts * (self.steps + self.warm_up)
        return [
            " ".join(f"t{1 + (n * 7 + seed) * k % 499}" for k in range(1, self.prompt + 1)) for n in range(1, count + 1)
        ]


def work_of(tiny: bool, steps: int) -> Work:
    """The step of the issue, or one that a CPU makes in a moment."""
    return Work(4, 2, 8, 6, steps, 1) if tiny else Work(32, 8, 128, 512, steps, 1)


def write_model(directory: Path, tiny: bool) -> None:
    """Random weights that no token ends a text of."""
    write_checkpoint(directory, TINY | {"head_dim": 32} if tiny else QWEN3_06B, endless=True)


def told(work: Work, steps: Sequence[dict[str, float]], **beside: Any) -> dict[str, Any]:
    """Median seconds of the timed steps by phase, and tokens/s; a step holds `step` and those of PHASES there are."""
    seconds = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    result: dict[str, Any] = {"seconds": {name: round(value, 4) for name, value in seconds.items()}}
    result["rollout_tokens_per_s"] = round(work.tokens / seconds["rollout"], 1)
    if "step" in seconds:
        result["step_tokens_per_s"] = round(work.tokens / seconds["step"], 1)
    each = [{name: round(value, 4) for name, value in step.items()} for step in steps]
    return result | {"steps": each} | beside
