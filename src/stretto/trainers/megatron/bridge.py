"""The Megatron trainer with Megatron-Bridge's names, which fills the model and exports it tensor by tensor."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.models.checkpoint import stored_dtype
from stretto.sync.binding import dtype_name, tensor_differences
from stretto.sync.files import CheckpointFiles, load
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, megatron_layout
from stretto.sync.parallel import MegatronSizes
from stretto.sync.streaming import StreamCheck, shown
from stretto.trainers.export import export_stream
from stretto.trainers.megatron.bridge_import import import_bridge, require_bridge
from stretto.trainers.megatron.build import build_chunks
from stretto.trainers.megatron.passes import prepare
from stretto.trainers.megatron.provider import expert_count, run_settings
from stretto.trainers.megatron.trainer import MegatronTrainer, local_tensors

_RAW = 'set trainer.names = "raw"'
_MUST_BE: dict[str, Any] = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
"""What our local layers compute; a provider that wants another model is refused."""
_ROTARY = ("rope_theta", "partial_rotary_factor")


class BridgeTrainer(MegatronTrainer):
    """Meets :class:`~stretto.trainers.base.Streaming`: its weights leave it only as whole tensors, one after another.

    Megatron-Bridge says how the model is configured, reads the checkpoint into it and makes the checkpoint's tensors of
    it; layers, rotary frequencies and passes are ours, as with raw names. At the start the stream is held against the
    checkpoint's layout and, bit by bit, against its files; where a weight map has the family for Megatron-Core, every
    rank's tensors are held against what the map makes of the files. Raises ValueError for what is not alike, and for a
    model that Megatron-Bridge does not know or our local layers cannot compute.
    """

    def _layout_of(self, atoms: Atoms) -> Layout:
        _check_model(self._directory, self._hf_config, self._sizes)
        dtype = dtype_name(self._dtype)
        self._by_map = None if atoms.weights.megatron is None else megatron_layout(atoms, dtype, self._sizes)
        self._dropped = atoms.weights.dropped
        self._bridge = import_bridge().from_hf_pretrained(str(self._directory))
        return replace(checkpoint_layout(atoms, dtype), title="the stream of Megatron-Bridge")

    def _builder(self, options: Mapping[str, Any], sequence_parallel: bool) -> Any:
        """Models by the bridge's own settings: a family's `options` are the raw names'."""

        def build() -> list[Any]:
            config = _provider(self._bridge, self._hf_config.model_type)
            settings = run_settings(
                self._hf_config,
                self._sizes,
                dtype=self._dtype,
                sequence_parallel=sequence_parallel,
                recompute=self._settings.activation_checkpointing,
            )
            for name, value in settings.items():
                setattr(config, name, value)
            config.finalize()
            prepare(config)
            return build_chunks(self._hf_config, self._sizes, config, self._world.device)

        return build

    def _check_built(self) -> None:
        if self._by_map is None:
            return
        own = tensor_differences(self._by_map, self._world.rank, local_tensors(self._models))
        # All ranks' before one raises: the others would wait for it in the next collective.
        if lines := [line for lines in self._world.gather(own) for line in lines]:
            raise ValueError(f"the weight map does not describe {self._by_map.title}:\n  " + "\n  ".join(shown(lines)))

    def _fill(self, models: Sequence[Any]) -> None:
        with redirect_stdout(io.StringIO()):  # a progress bar, and warnings about what is checked here
            self._bridge.load_hf_weights(list(models))
        if models is self._models:
            said = self._world.gather(self._unlike_map())
            _refuse([line for lines in said for line in lines] or self._world.from_first(self._unlike_files()))

    def _unlike_map(self) -> list[str]:
        """This rank's tensors that are not, bit by bit, what the weight map makes of the checkpoint."""
        if self._by_map is None:
            return []
        rank, found = self._world.rank, local_tensors(self._models)
        expected = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in self._by_map.local(rank).items()
        }
        source = checkpoint_layout(self._by_map.atoms, stored_dtype(self._directory))
        with CheckpointFiles(self._directory) as files:
            load(files, source, self._by_map, rank, expected)
        return [
            f"{name} at rank {rank} has other bits than the weight map gives it"
            for name, tensor in expected.items()
            if not _same_bits(found[name], tensor)
        ]

    def _unlike_files(self) -> list[str]:
        """In what the stream is not the checkpoint that it came from; the first rank looks at the bits."""
        check, lines = StreamCheck(self._layout), []
        with CheckpointFiles(self._directory) as files:
            for name, tensor in self.stream():
                if check.takes(name, tensor) and self._world.first and not _same_bits(tensor, files.read(name)):
                    lines.append(f"{name} has other bits than the checkpoint's file")
        return [*check.lines(), *lines]

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """See the contract. What the checkpoint has beside the model, such as a copy of a tied head, is left out."""
        for name, tensor in self._bridge.export_hf_weights(self._models, cpu=False, show_progress=False):
            if not any(fnmatch(name, pattern) for pattern in self._dropped):
                yield name, tensor.detach()

    def export(self, directory: Path, dtype: torch.dtype) -> None:
        """See the contract."""
        export_stream(directory, self._layout, self.stream, dtype, self._directory, self._world)


def _check_model(directory: Path, hf_config: Any, sizes: MegatronSizes) -> None:
    """Raise ValueError for a model that Megatron-Bridge does not know, or does not carry at these sizes."""
    known = require_bridge()
    architectures = list(hf_config.architectures or [type(hf_config).__name__])
    if not known.architectures.intersection(architectures):
        raise ValueError(
            f"megatron-bridge {known.version} does not know {', '.join(architectures)}; {_RAW}, with a weight map that "
            f"`stretto new-model {directory}` begins if there is none"
        )
    if expert_count(hf_config) and not sizes.grouped_experts:
        raise ValueError(
            f"megatron-bridge {known.version} exports experts only from Transformer Engine's grouped layers, and here "
            f"each expert is a layer of its own; {_RAW} for {hf_config.model_type}"
        )
    rows = hf_config.get_text_config().vocab_size
    if rows % sizes.tp:
        raise ValueError(
            f"Megatron-Bridge does not pad: tp = {sizes.tp} does not divide the {rows} rows of the embedding; "
            f"lower trainer.tp, or {_RAW}"
        )


def _provider(bridge: Any, model_type: str) -> Any:
    """The bridge's configuration of the model. Raises ValueError when it is not one that our layers compute."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    _spell_rotary(bridge.hf_pretrained.config)
    provider = bridge.to_megatron_provider(load_weights=False)
    if type(provider).provide is not GPTModelProvider.provide:
        raise ValueError(
            f"Megatron-Bridge has a model class of its own for {model_type} ({type(provider).__name__}), which is not "
            f"built here; {_RAW}"
        )
    if provider.multi_latent_attention or getattr(provider, "experimental_attention_variant", None):
        raise ValueError(f"megatron: the attention of {model_type} is not built from a bridge's settings; {_RAW}")
    for name, value in _MUST_BE.items():
        if getattr(provider, name) != value:
            raise ValueError(
                f"megatron: {model_type} has {name} = {getattr(provider, name)} and our layers compute {value}; "
                "use trainer.backend fsdp"
            )
    return provider


def _spell_rotary(config: Any) -> None:
    """Give transformers' rotary parameters the names that some bridges read them by; our own tables are used."""
    for name, value in (getattr(config, "rope_parameters", None) or {}).items():
        if name in _ROTARY and not hasattr(config, name):
            setattr(config, name, value)


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether a tensor is another one, rounded to its dtype."""
    rounded = expected.to(found.dtype)
    if found.shape != rounded.shape:
        return False
    one, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (found, rounded))
    return torch.equal(one, other)


def _refuse(lines: list[str]) -> None:
    if lines:
        raise ValueError("Megatron-Bridge does not carry this checkpoint:\n  " + "\n  ".join(shown(lines)))
