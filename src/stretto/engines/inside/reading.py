"""Reading a parcel in one rank of an engine, for a trainer that speaks to it through files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.engines.inside.base import Inside, told
from stretto.files import write_aside
from stretto.sync.parcels.manifest import ParcelError
from stretto.sync.parcels.places import answer_name
from stretto.sync.parcels.reading import Parcel


def read(call: Mapping[str, Any], inside: Inside) -> None:
    """Verify or load the parcel that the trainer names, and leave in it how that went.

    Raises nothing: a server may end with what its loader raises, when it could serve its old weights on.
    """
    directory, rank = Path(call["parcel"]), int(call["first_rank"]) + inside.rank
    error = None
    try:
        with Parcel(directory, call["digest"]) as parcel:
            if call["step"] == "verify":
                parcel.verify()
            else:
                inside.load(parcel.tensors(inside.device))
    except ParcelError as failure:
        error = str(failure)
    except Exception as failure:
        error = told(failure)
    try:
        write_aside(directory / answer_name(call["step"], rank), json.dumps({"error": error}))
    except OSError as failure:  # the trainer misses the answer, and says to look here
        print(f"stretto: rank {rank} cannot answer in {directory} ({failure}); {error}", file=sys.stderr, flush=True)
