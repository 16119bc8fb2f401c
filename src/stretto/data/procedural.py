"""reasoning_gym's datasets: questions made up from a seed, each with the entry that its scorer wants back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stretto.data.nearest import listed

PREFIX = "reasoning_gym:"
# Their entries hold no answer, and their scorers give that 0.0: nothing tells a broken scorer from a wrong response.
UNSCORABLE = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
# An item's generator is seeded by seed + index, so seeds that lie close together make the same items.
EVAL_SEED_OFFSET = 2**30


def is_procedural(source: str) -> bool:
    """Whether `source` is ``reasoning_gym:<dataset>``."""
    return source.startswith(PREFIX)


def eval_args(source: str, train_source: str, args: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Arguments for `source` as eval.source: data.args when it is the dataset trained on, and items of its own."""
    if not is_procedural(source):
        return {}
    shared = dict(args) if source == train_source else {}
    return {**shared, "seed": shared.get("seed", seed) + EVAL_SEED_OFFSET}


def read_procedural(source: str, args: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Rows with the columns ``prompt``, ``answer`` and ``reasoning_gym``, the last being what scoring needs.

    ``reasoning_gym`` is ``{"dataset", "args", "entry"}``, so that ``create_dataset(dataset, **args)`` has the scorer
    ``score_answer(text, entry)``. `args` go to the dataset (size 500 and `seed` unless given). Raises ValueError for an
    unknown dataset or argument, for arguments that the dataset refuses, and for datasets whose scorer is unchecked.
    """
    name = source.removeprefix(PREFIX)
    full = _checked(name, {"size": 500, "seed": seed, **args})
    try:
        from reasoning_gym import create_dataset

        entries = list(create_dataset(name, **full))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym's {name} refuses data.args = {dict(args)}: {error}") from error
    return [_row(name, full, entry) for entry in entries]


def _row(name: str, args: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    scoring = {"dataset": name, "args": args, "entry": entry}
    return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": scoring}


def _checked(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """`args` as the dataset's constructor takes them."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"{PREFIX}{name} needs reasoning-gym, which is not installed: pip install reasoning-gym"
        ) from error
    _check_scorable(name, DATASETS)
    valid = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in args:
        if key not in valid:
            raise ValueError(f"reasoning_gym's {name} has no argument {key!r} in data.args {listed(key, valid)}")
    return args if name != "composite" else {**args, "datasets": _parts(args.get("datasets"), DATASETS)}


def _check_scorable(name: str, valid: Mapping[str, Any]) -> None:
    if name not in valid:
        raise ValueError(f"reasoning_gym has no dataset {name!r} {listed(name, valid)}")
    if name in UNSCORABLE:
        raise ValueError(
            f"reasoning_gym's {name} cannot be trained on: its entries name no answer and its scorer gives them "
            "0.0, so the scorer cannot be checked; choose another dataset"
        )


def _parts(specs: Any, valid: Mapping[str, Any]) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    if not isinstance(specs, list) or not specs:
        raise ValueError(
            "reasoning_gym's composite needs to be told what it is composed of: "
            'data.args.datasets = [{ name = "chain_sum", weight = 1.0, config = {} }, ...]'
        )
    for spec in specs:
        if not isinstance(spec, dict) or spec.keys() != {"name", "weight", "config"}:
            raise ValueError(f"data.args.datasets: every part needs name, weight and config (only), not {spec!r}")
        _check_scorable(spec["name"], valid)
    return [DatasetSpec(**spec) for spec in specs]
