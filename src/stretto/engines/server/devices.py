"""Which GPUs a server sees."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.engines.server.dialect import Setup


def visible_devices(setup: Setup, environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for `tp` ranks from the engine's device on, as this process counts them; none on CPU.

    Raises ValueError when this process does not see as many.
    """
    if setup.device.type != "cuda":
        return {}
    first = setup.device.index or 0
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        chosen = [str(number) for number in range(first, first + setup.tp)]
    else:
        chosen = [one.strip() for one in given.split(",") if one.strip()][first : first + setup.tp]
    if len(chosen) < setup.tp:
        raise ValueError(
            f"the engine's {setup.tp} ranks (engine.tp) do not fit on the GPUs from number {first} on; "
            f"CUDA_VISIBLE_DEVICES is {given}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
