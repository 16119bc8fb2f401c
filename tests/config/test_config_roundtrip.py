from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stretto.config import ConfigError, config_from_dict, dump_toml, load_config
from stretto.config.help import keys_help
from stretto.config.keys import Key, keys
from stretto.config.relevance import ignored_keys

NUMBERS = {
    # Inside the range of every key of that name; the others take 1.
    "rollout.samples_per_prompt": st.integers(2, 64),
    "model.max_length": st.integers(2, 2**40),
    "algorithm.dual_clip": st.floats(1.5, 9),
}
ARGS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
SOURCES = st.sampled_from(["org/set", "/data/rows.jsonl", "/data/rows.parquet", "reasoning_gym:chain_sum"])
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


def values_of(key: Key) -> st.SearchStrategy[Any]:
    if key.name in NUMBERS:
        return NUMBERS[key.name]
    if key.name == "name":
        return st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,9}\Z")
    if key.name in ("data.source", "eval.source"):
        return SOURCES
    if key.name in ("model.path", "reward.functions"):
        return st.sampled_from(["org/model", "/x/m"]) if key.name == "model.path" else st.just(["m:f", "/r/s.py:g"])
    if key.name == "model.map":
        return st.sampled_from(["/maps/m.py", "map.py"])
    if key.name == "engine.url":
        return st.sampled_from(["http://localhost:30000", "https://host/"])
    if key.name == "engine.python":
        return st.sampled_from(["python3.11", "/venv/bin/python", "venv/bin/python"])
    if key.name == "sync.directory":
        return st.sampled_from(["/shared/weights", "weights"])
    if key.name == "sync.receivers":
        return st.lists(st.sampled_from(["http://host:8100", "https://host:8101"]), max_size=3)
    if key.name == "trainer.pp_layers":
        return st.lists(st.integers(1, 9), max_size=4)
    if key.name == "reward.weights":
        return st.lists(st.floats(-5, 5), min_size=2, max_size=2)
    return _values_of_type(key.annotation)


def _values_of_type(annotation: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(annotation)
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is dict:
        return ARGS
    if origin is tuple:
        return st.lists(st.floats(0, 0.999), min_size=2, max_size=2)
    if origin is list:
        return st.lists(_values_of_type(get_args(annotation)[0]), max_size=3)
    kinds = {bool: st.booleans(), int: st.integers(1, 64), float: st.floats(0.01, 0.99), str: TEXTS}
    return kinds[annotation]


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for key in keys().values():
        if key.required or draw(st.integers(0, 3)) == 0:
            section, _, name = key.name.rpartition(".")
            (raw.setdefault(section, {}) if section else raw)[name] = draw(values_of(key))
    return raw


def without_problems(raw: dict[str, Any]) -> Any:
    """The configuration of `raw`, less the keys that it says are ignored or contradict others."""
    for _ in range(9):
        try:
            return config_from_dict(raw)
        except ConfigError as error:
            for line in str(error).splitlines():
                section, _, name = line.split(" ")[0].partition(".")
                assert raw[section].pop(name, None) is not None, line
    return None


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(raw_configs())
def test_a_dumped_configuration_loads_to_an_equal_one(raw: dict[str, Any]) -> None:
    config = without_problems(raw)
    assume(config is not None)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.toml"
        path.write_bytes(dump_toml(config).encode())
        assert load_config(path) == config


def test_a_dump_shows_the_defaults_and_leaves_out_what_does_nothing() -> None:
    config = config_from_dict(
        {"model": {"path": "m"}, "data": {"source": "a.jsonl"}, "reward": {"functions": ["math_verify"]}}
    )
    raw = tomllib.loads(dump_toml(config))
    shown = {f"{section}.{name}" for section, table in raw.items() if isinstance(table, dict) for name in table}
    silent = {name for name, key in keys().items() if "." in name and not key.required and key.default is None}
    assert raw["trainer"]["lr"] == 1e-6
    assert "algorithm.kl_estimator" in ignored_keys(config)
    assert shown == {name for name in keys() if "." in name} - ignored_keys(config) - silent


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"data": {"source": "reasoning_gym:chain_sum", "args": {"size": None}}}, "data.args"),
        ({"data": {"source": "reasoning_gym:chain_sum", "template_args": {"x": {"y": None}}}}, "data.template_args"),
        ({"engine": {"backend": "sglang", "sglang": {"chunked_prefill_size": None}}}, "engine.sglang"),
    ],
)
def test_what_toml_cannot_express_is_refused_by_name(change: dict[str, Any], key: str) -> None:
    base = {"model": {"path": "m"}, "data": {"source": "org/x"}, "reward": {"functions": ["m:f"]}}
    with pytest.raises(ConfigError, match=rf"^{key} has a value that TOML cannot express"):
        dump_toml(config_from_dict(base | change))


def test_every_key_has_a_sentence_and_the_help_shows_it_with_what_it_accepts() -> None:
    text = " ".join(keys_help().split())
    for key in keys().values():
        assert key.sentence.endswith("."), key.name
        assert f"--{key.name} ({key.accepts}; " in text
        assert " ".join(key.sentence.split()) in text


def test_a_key_without_a_value_has_no_other_default() -> None:
    """Otherwise leaving it out of a dump would bring its default back."""
    for key in keys().values():
        if not key.required and key.default is not None:
            section, _, name = key.name.rpartition(".")
            raw = {section: {name: None}} if section else {name: None}
            with pytest.raises(ConfigError, match=f"(?m)^{key.name} is null"):
                config_from_dict(raw)
