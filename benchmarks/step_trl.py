"""TRL's side of step.py: GRPOTrainer on its transformers path."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from step_vs_trl import grpo_settings, odd_digits
from step_work import MODEL, Work, told
from sync_work import say

CACHES = ("dynamic", "static")
# 32 rows of 640 tokens keep about 60 GB of activations; twice as many would not be sure to fit.
ROWS = 32


class Clock:
    """Seconds of a kind of call, added up since they were last taken; the device has finished at both ends."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = now()
            try:
                return call(*arguments, **named)
            finally:
                self._seconds += now() - begin

        return timed

    def take(self) -> float:
        """What it shows; it begins anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def now() -> float:
    """The time at which the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_trl(work: Work, scratch: Path) -> dict[str, Any]:
    """A step with each cache of transformers first, then the timed ones with the faster of them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer

    lengths: list[int] = []
    reward_clock, rollout_clock = Clock(), Clock()

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return list(reward_clock.around(odd_digits)(completions))

    tokenizer = AutoTokenizer.from_pretrained(scratch / MODEL, padding_side="left")
    # TRL needs an end of sequence; this one's id is beyond the model's vocabulary, so it is never drawn.
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    on_gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(
        scratch / MODEL, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation="sdpa"
    )
    model.generate = rollout_clock.around(model.generate)
    texts = [*work.texts(seed=2)[: work.prompts * (len(CACHES) - work.warm_up)], *work.texts(seed=0)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_settings(
            scratch,
            prompts=work.prompts,
            samples=work.samples,
            new=work.new,
            steps=len(CACHES) + work.steps,
            rows=ROWS,
            on_gpu=on_gpu,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
    )
    steps = _clocked(trainer, rollout_clock, reward_clock)
    trainer.train()
    if set(lengths) != {work.new}:
        raise RuntimeError(f"responses of {set(lengths)} tokens instead of {work.new}: not the same work")
    tried = {cache: step["rollout"] for cache, step in zip(CACHES, steps, strict=False)}
    return told(work, steps[len(CACHES) :], rollout_seconds_by_cache=tried, rows=min(ROWS, work.responses))


def _clocked(trainer: Any, rollout: Clock, reward: Clock) -> list[dict[str, float]]:
    """The seconds of the trainer's steps, filled as it goes; it changes the cache between them."""
    from transformers import TrainerCallback

    steps: list[dict[str, float]] = []
    ends: list[float] = []

    def use(cache: str) -> None:
        for settings in (trainer.generation_kwargs, trainer.generation_config.__dict__):
            settings["cache_implementation"] = None if cache == "dynamic" else cache

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(now())
            use(CACHES[0])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())
            (whole,) = (after - before for before, after in pairwise(ends[-2:]))
            step = {"step": whole, "rollout": rollout.take(), "reward": reward.take()}
            steps.append({**step, "train": whole - step["rollout"] - step["reward"]})
            say(f"trl: step {len(steps)} {steps[-1]}")
            if len(steps) < len(CACHES):
                use(CACHES[len(steps)])
            else:
                use(min(CACHES, key=lambda cache: steps[CACHES.index(cache)]["rollout"]))

    trainer.add_callback(Stopwatch())
    return steps
