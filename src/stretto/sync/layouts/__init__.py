"""How each side cuts a model over its ranks, one file a kind of side."""

from stretto.sync.layouts.engine import EngineSizes, engine_layout
from stretto.sync.layouts.megatron import megatron_layout
from stretto.sync.layouts.whole import checkpoint_layout, fsdp_layout, loader_layout, replica_layout

__all__ = [
    "EngineSizes",
    "checkpoint_layout",
    "engine_layout",
    "fsdp_layout",
    "loader_layout",
    "megatron_layout",
    "replica_layout",
]
