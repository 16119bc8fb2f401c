"""Keys that contradict each other, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.config.run import RunConfig
    from stretto.config.sections import SyncConfig, TrainerConfig

_VLLM_HOTTEST = 2


def filters_of(config: RunConfig) -> list[str]:
    """The sampling filters that are switched on, by key."""
    rollout = config.rollout
    on = {"rollout.top_p": rollout.top_p < 1, "rollout.top_k": rollout.top_k > 0, "rollout.min_p": rollout.min_p > 0}
    return [key for key, value in on.items() if value]


def streams_here(config: RunConfig) -> bool:
    """Whether Megatron-Bridge streams into the embedded engine: nothing has a map, and nothing is cut into buckets."""
    trainer = config.trainer
    return trainer.backend == "megatron" and trainer.names == "bridge" and config.engine.backend == "embedded"


def through_files(config: RunConfig) -> bool:
    """Whether weights go to a server as files."""
    return config.engine.backend != "embedded" and config.sync.transport in ("disk", "http")


def contradictions(config: RunConfig) -> Iterator[str]:
    """A line for each key that contradicts another, with what to do."""
    if (on := filters_of(config)) and not config.rollout.allow_filtered_sampling:
        yield (
            f"{on[0]} filters the distribution that tokens are drawn from, so the importance ratio is biased; "
            "set rollout.allow_filtered_sampling = true to train on such samples"
        )
    weights = config.reward.weights
    if weights is not None and len(weights) != len(config.reward.functions):
        yield f"reward.weights has {len(weights)} values for {len(config.reward.functions)} functions"
    updates, prompts = config.trainer.updates_per_batch, config.rollout.prompts_per_step
    if updates > prompts:
        yield f"trainer.updates_per_batch = {updates} is more than the {prompts} prompts of a step"
    yield from _megatron_contradictions(config.trainer)
    if config.mode.kind == "fully_async":
        yield from _async_contradictions(config)
    elif through_files(config):
        yield from _lacking_of_files(config.sync)
    if config.engine.backend == "vllm":
        yield from _vllm_contradictions(config)


def _async_contradictions(config: RunConfig) -> Iterator[str]:
    if config.launch.backend != "ray":
        yield 'mode.kind = "fully_async" needs processes for each part: set launch.backend = "ray" (or --launch ray)'
    if through_files(config):
        yield (
            f'sync.transport = "{config.sync.transport}" is not built for mode.kind = "fully_async"; leave it out, or '
            "set ipc or collective"
        )
    if config.trainer.backend == "megatron" and config.trainer.names == "bridge":
        yield (
            'trainer.names = "bridge" gives its weights only between optimizer steps, and mode.kind = "fully_async" '
            'publishes while the trainer works; set trainer.names = "raw"'
        )
    if config.engine.url is not None and config.placement.engines > 1:
        yield f"engine.url names one server and placement.engines is {config.placement.engines}; set that to 1"


def _lacking_of_files(sync: SyncConfig) -> Iterator[str]:
    """What the transport has to be told."""
    if sync.transport == "disk" and sync.directory is None:
        yield 'sync.transport = "disk" needs sync.directory, a directory that the trainer and the server both see'
    if sync.transport == "http" and not sync.receivers:
        yield (
            'sync.transport = "http" needs sync.receivers: start `python -m stretto.sync.receiver` beside each server '
            "and name their addresses"
        )


def _megatron_contradictions(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.backend != "megatron":
        return
    stages = trainer.pp * trainer.vpp
    if trainer.pp_layers and trainer.pp > 1 and len(trainer.pp_layers) != stages:
        yield (
            f"trainer.pp_layers has {len(trainer.pp_layers)} numbers and there are {stages} stages "
            "(trainer.pp x trainer.vpp)"
        )
    if trainer.dtype == "float64":
        yield (
            'trainer.dtype = "float64" needs the fsdp trainer: the optimizer of megatron is float32; '
            'set "auto", "float32" or "bfloat16"'
        )
    if trainer.packed:
        yield (
            'trainer.batching = "packed" needs the fsdp trainer: the attention of Megatron\'s local layers has no mask '
            'for packed rows; set "padded" or leave it out'
        )


def _vllm_contradictions(config: RunConfig) -> Iterator[str]:
    """vLLM's log-probs come after temperature and filters or before both; ours are after temperature alone."""
    on, evaluates = filters_of(config), config.eval.source is not None or config.data.heldout > 0
    temperatures = {"rollout.temperature": config.rollout.temperature}
    if evaluates:
        temperatures["eval.temperature"] = config.eval.temperature
    for key, value in temperatures.items():
        if value > _VLLM_HOTTEST:
            yield f"{key} is {value:g}; vLLM takes at most {_VLLM_HOTTEST}: lower it or take another engine.backend"
        elif on and value not in (0, 1):
            yield (
                f"{key} is {value:g} and {on[0]} filters: vLLM gives log-probs either after both or before both; "
                f"set {key} = 1, switch off the filters, or take another engine.backend"
            )
