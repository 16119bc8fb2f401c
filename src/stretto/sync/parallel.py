"""The sizes that cut a model over ranks, and which layers a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronSizes:
    """Megatron-Core's parallel sizes and the build options that move weights.

    `tp` tensor, `pp` pipeline, `vpp` virtual stages (model chunks) a rank, `ep` expert, `etp` expert tensor, `dp`
    data parallel. `pp_layers` counts the layers of every (virtual) stage in the order of the model; `vocab_divisor`
    is what the rows of the embedding are padded to a multiple of, for each TP rank; `te` and `grouped_experts` choose
    among Megatron's spellings and storages. Ranks are in Megatron's default order, tp-cp-ep-dp-pp.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    pp_layers: tuple[int, ...] = ()
    vocab_divisor: int = 1
    te: bool = False
    grouped_experts: bool = False

    def __post_init__(self) -> None:
        small = [name for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "vocab_divisor") if getattr(self, name) < 1]
        if small:
            raise ValueError(f"megatron: {', '.join(small)} must be at least 1")
        if (self.tp * self.dp) % (self.ep * self.etp):
            raise ValueError(
                f"megatron: tp x dp = {self.tp * self.dp} ranks of a stage do not divide into ep x etp = "
                f"{self.ep * self.etp}; raise dp, or lower ep or etp"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError("megatron: vpp needs pp > 1")
        if self.pp_layers and len(self.pp_layers) != self.pp * self.vpp:
            raise ValueError(
                f"megatron: pp_layers has {len(self.pp_layers)} numbers and there are {self.pp * self.vpp} stages "
                "(pp x vpp)"
            )

    @property
    def ranks(self) -> int:
        """How many ranks hold the model."""
        return self.tp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """How many ranks of a stage hold the same experts."""
        return self.tp * self.dp // (self.ep * self.etp)

    def place(self, rank: int) -> dict[str, int]:
        """The rank's coordinates: tp, dp, pp for most weights, etp, ep, edp for experts."""
        inner = rank % (self.tp * self.dp)
        return {
            "tp": inner % self.tp,
            "dp": inner // self.tp,
            "pp": rank // (self.tp * self.dp),
            "etp": inner % self.etp,
            "ep": inner // self.etp % self.ep,
            "edp": inner // (self.etp * self.ep),
        }

    def layers(self, count: int) -> list[list[range]]:
        """The layers (numbered over the model) of each stage's chunks: ``layers(count)[stage][chunk]``.

        Virtual stage ``chunk * pp + stage`` follows the one before it. When `count` does not divide, the first stages
        get one layer more. Raises ValueError when `pp_layers` does not add up to `count` or a stage would be empty.
        """
        stages = self.pp * self.vpp
        sizes = self.pp_layers or tuple(count // stages + (index < count % stages) for index in range(stages))
        if sum(sizes) != count:
            raise ValueError(f"megatron: pp_layers adds up to {sum(sizes)} and the model has {count} layers")
        if min(sizes) < 1:
            raise ValueError(f"megatron: {count} layers leave one of {stages} stages empty; lower pp or vpp")
        starts = [sum(sizes[:index]) for index in range(stages)]
        ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return [[ranges[chunk * self.pp + stage] for chunk in range(self.vpp)] for stage in range(self.pp)]
