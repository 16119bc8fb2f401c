"""`stretto export`: a checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from stretto.files import sync_tree
from stretto.orchestration.checkpoint import CheckpointStore
from stretto.world import World


def export(run_dir: Path, out_dir: Path, step: int | None = None) -> None:
    """Copy the Hugging Face model of the checkpoint of `step` (None: the newest) to `out_dir`, which must not exist.

    Raises ValueError when there is no such checkpoint or `out_dir` exists.
    """
    store = CheckpointStore(run_dir, keep=1, world=World(0, 1, torch.device("cpu")))
    steps = store.steps()
    if not steps:
        raise ValueError(f"{run_dir} has no checkpoint; is it the directory of a run?")
    if step is not None and step not in steps:
        raise ValueError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    if out_dir.exists():
        raise ValueError(f"{out_dir} exists; name a directory that does not")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        shutil.copytree(store.path(steps[-1] if step is None else step) / "hf", aside, dirs_exist_ok=True)
        aside.chmod(0o755)
        sync_tree(aside)
        os.rename(aside, out_dir)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
