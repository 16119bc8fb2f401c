"""What is checked: a model, the two sides that it has to fit, and their sizes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stretto.config import RunConfig, config_from_dict
from stretto.sync.parallel import MegatronSizes

TRAINERS = ("fsdp", "megatron")
ENGINES = ("embedded", "sglang", "vllm")
_MEGATRON_ALONE = ("tp", "pp", "vpp", "ep", "etp")

LEARNING_RATE = 1e-3
"""Moves every weight visibly in one step, also one that is held in bfloat16."""
_MICRO_BATCH_TOKENS = 160
"""Small, so that a step has several micro-batches to add up and a pipeline has something to overlap."""


@dataclass(frozen=True)
class CheckSettings:
    """One check. `dp` of 0 is the least that the other sizes need; `layers` of 0 lets the probe choose."""

    model: str
    trainer: str = "fsdp"
    engine: str = "embedded"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 0
    sequence_parallel: bool = False
    names: str = "raw"
    engine_tp: int = 1
    map_file: str | None = None
    dtype: str = "float32"
    layers: int = 0
    live: bool = False
    """Start a server of the engine."""
    engine_python: str | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.engine_tp, *(getattr(self, name) for name in _MEGATRON_ALONE)) < 1 or min(self.dp, self.layers) < 0:
            raise ValueError("parallel sizes must be at least 1")
        if self.trainer == "fsdp":
            given = [f"--{name}" for name in _MEGATRON_ALONE if getattr(self, name) > 1]
            given += ["--sp"] * self.sequence_parallel + ["--names"] * (self.names != "raw")
            if given:
                raise ValueError(f"{', '.join(given)} is for --trainer megatron; FSDP2 has --dp ranks alone")
        elif self.sequence_parallel and self.tp == 1:
            raise ValueError("--sp cuts sequences over tensor parallel ranks: it needs --tp above 1")
        if self.map_file is not None and self.names == "bridge":
            raise ValueError(
                "--map is for the raw names: Megatron-Bridge has maps of its own; leave out --map or --names"
            )
        if self.engine == "embedded" and self.engine_tp > 1:
            raise ValueError(
                "the embedded engine holds the whole model on each rank; --engine-tp is for sglang and vllm"
            )
        if self.engine == "embedded" and self.live:
            raise ValueError("--live is for sglang and vllm: the embedded engine always is")
        if not self.live and (self.engine_python or self.engine_options):
            raise ValueError("--engine-python and --engine-option are for a server: add --live")
        _ = self.megatron  # sizes that do not fit each other are refused before a model is read

    @property
    def ranks(self) -> int:
        """How many processes the trainer takes."""
        return self.megatron.ranks

    @property
    def megatron(self) -> MegatronSizes:
        """The sizes of the trainer; FSDP2's ranks are `dp`. Raises ValueError when they do not fit each other."""
        least = math.lcm(self.tp, self.ep * self.etp) // self.tp
        te = False
        if self.trainer == "megatron":
            from stretto.trainers.megatron.parallel import transformer_engine

            te = transformer_engine()
        return MegatronSizes(self.tp, self.pp, self.vpp, self.ep, self.etp, self.dp or least, te=te)

    @property
    def stages(self) -> int:
        """Pipeline stages, virtual ones included: each has at least one layer."""
        return self.pp * self.vpp

    def config(self) -> RunConfig:
        """The run that the check takes its trainer and engine from. Its prompts and rewards are never looked at."""
        trainer = {
            "backend": self.trainer,
            "dtype": self.dtype,
            "lr": LEARNING_RATE,
            "micro_batch_tokens": _MICRO_BATCH_TOKENS,
        }
        if self.trainer == "megatron":
            sizes = {name: getattr(self, name) for name in _MEGATRON_ALONE}
            trainer |= {name: size for name, size in sizes.items() if size > 1} | {"names": self.names}
            trainer |= {"sequence_parallel": True} if self.sequence_parallel else {}
        model = {"path": self.model}
        if self.map_file is not None:
            model["map"] = self.map_file
        return config_from_dict(
            {
                "model": model,
                "data": {"source": "unused.jsonl"},
                "reward": {"functions": ["math_verify"]},
                "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 21},
                "trainer": trainer,
                "engine": self._engine(),
                "algorithm": {"mismatch": "off"},
            }
        )

    def _engine(self) -> dict[str, Any]:
        if self.engine == "embedded":
            return {"dtype": self.dtype}
        if not self.live:
            return {}
        python = {"python": self.engine_python} if self.engine_python else {}
        options = {self.engine: self.engine_options} if self.engine_options else {}
        sizes = {"backend": self.engine, "tp": self.engine_tp, "dtype": self.dtype, "max_sequences": 8}
        return {**sizes, **python, **options}

    def to_json(self) -> str:
        """For the processes that do the work."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CheckSettings:
        """Inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    def title(self) -> str:
        """The trainer with the sizes above 1."""
        sizes = vars(self.megatron)
        shown = [f"{one.name}={sizes[one.name]}" for one in fields(self) if sizes.get(one.name, 1) > 1]
        shown += ["sp"] * self.sequence_parallel + [self.names] * (self.trainer == "megatron")
        return f"{self.trainer}({', '.join(shown)})" if shown else self.trainer
