"""After a publication: whether the engine computes with the weights that the trainer has."""

from __future__ import annotations

import torch

from stretto.config import RunConfig
from stretto.engines import RolloutEngine
from stretto.errors import RunError
from stretto.orchestration.dtypes import engine_dtype
from stretto.sync.publication import Publisher
from stretto.trainers import Trainer
from stretto.types import Prompt, Request, Rollout, Sampling
from stretto.world import World

_NEW_TOKENS = 16
_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Largest mean |difference| of log-probs that rounding explains; a wrong tensor gives far more."""
_PROBE_ID = 0


class Verification:
    """Compares every `sync.verify_every` publications, with a fixed prompt. All ranks call together."""

    def __init__(
        self, config: RunConfig, world: World, prompt: Prompt, engine: RolloutEngine, trainer: Trainer, sync: Publisher
    ):
        self._config, self._world, self._prompt = config, world, prompt
        self._engine, self._trainer, self._publisher = engine, trainer, sync
        self._bound = config.sync.verify_bound or _BOUNDS[engine_dtype(config, world)]

    def due(self, number: int) -> bool:
        """Whether publication `number` is to be verified."""
        every = self._config.sync.verify_every
        return bool(every) and number % every == 0

    def run(self, number: int) -> dict[str, float]:
        """The metrics. Raises RunError, on every rank, beyond the bound or when a tensor differs."""
        wrong = self._world.union(self._publisher.reread(number))
        total, count, most = self._difference()
        total, count = self._world.sum([total, count])
        mean, (most,) = total / count, self._world.max([most])
        if wrong or not mean <= self._bound:
            raise RunError(self._complaint(number, mean, wrong))
        return {"sync/verify_logprob_diff_mean": mean, "sync/verify_logprob_diff_max": most}

    def _difference(self) -> tuple[float, int, float]:
        """Sum, number and largest of |engine - trainer| over the tokens of the probe."""
        rollout = self._config.rollout
        sampling = Sampling(min(_NEW_TOKENS, rollout.max_new_tokens), rollout.temperature)
        request = Request(_PROBE_ID, self._prompt.ids, (self._config.seed,), sampling)
        (done,) = self._engine.generate([request], deadline_s=rollout.timeout_s)
        probe = Rollout.of(
            done, self._prompt.ids, temperature=rollout.temperature, group_id=0, source_row=self._prompt.row
        )
        (ours,) = self._trainer.logprobs([probe])
        gaps = [abs(a - b) for a, b in zip(ours, probe.logprobs_T, strict=True)]
        return sum(gaps), len(gaps), max(gaps)

    def _complaint(self, number: int, mean: float, wrong: list[str]) -> str:
        config = self._config
        command = (
            f"stretto check {config.model.path} --trainer {config.trainer.backend} --engine {config.engine.backend}"
        )
        said = f"; these tensors of the engine have other values: {', '.join(wrong[:10])}" if wrong else ""
        return (
            f"after publication {number} the engine's log-probs differ from the trainer's by {mean:.2g} on average "
            f"(at most {self._bound:g} is explained by rounding: sync.verify_bound){said}. `{command}` finds the weight"
        )
