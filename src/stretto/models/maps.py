"""The weight map of a checkpoint: its family's, the user's own, or that of whole tensors under their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.models.checkpoint import empty_model, load_config
from stretto.models.identity import Whole, identity_map
from stretto.models.language import WeightMap
from stretto.models.registry import claims, load_map_file, weight_map


def map_of(directory: Path, map_file: str | None = None) -> WeightMap:
    """The map of the checkpoint in `directory`; `map_file` (model.map) declares families that are not shipped.

    A model of no known family gets a map in which every tensor is itself, which serves FSDP2 and the embedded engine.
    Raises ValueError when the map file cannot be run or two maps claim the model.
    """
    if map_file is not None:
        load_map_file(Path(map_file))
    config = load_config(directory)
    return weight_map(config) if claims(config) else whole_tensors(directory)


def whole_tensors(directory: Path) -> WeightMap:
    """The identity map of the checkpoint's model. Raises ValueError where loading it cuts or joins tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = empty_model(directory)
    tied = sorted(getattr(model, "all_tied_weights_keys", None) or {})
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    in_files = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(held)).items()}
    kind = model.config.model_type
    if changed := [name for name, tensor in held.items() if id(tensor) not in in_files]:
        raise ValueError(
            f"{kind} models need a weight map: transformers holds {changed[0]} (and {len(changed) - 1} others) "
            "otherwise than the files; begin a map with `stretto new-model` and name it in model.map"
        )
    parameters = {name for name, _ in model.named_parameters()}
    tensors = [Whole(name, in_files[id(tensor)], tensor, name not in parameters) for name, tensor in held.items()]
    return identity_map(kind, tensors, tied)
