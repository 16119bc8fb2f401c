from __future__ import annotations

from typing import Any

import pytest

from stretto.config import ConfigError, RunConfig, config_from_dict
from stretto.config.keys import keys
from stretto.config.relevance import IGNORED

BASE: dict[str, Any] = {
    "model.path": "m",
    "data.source": "org/prompts",
    "reward.functions": ["math_verify"],
    "algorithm.kl_coef": 0.1,
    "algorithm.aggregation": "constant_length",
    "trainer.schedule": "cosine",
    "data.heldout": 5,
    "trainer.updates_per_batch": 2,
    "rollout.top_p": 0.9,
    "rollout.allow_filtered_sampling": True,
}
ASYNC = {"mode.kind": "fully_async", "launch.backend": "ray"}
# For each rule of the table, what to change in BASE so that it ignores its keys.
CHANGES: dict[str, dict[str, Any]] = {
    "algorithm.kl_coef is 0": {"algorithm.kl_coef": 0.0},
    'with trainer.updates_per_batch = 1 and algorithm.old_logprobs = "trainer" the ratio is exactly 1': {
        "trainer.updates_per_batch": 1
    },
    'algorithm.old_logprobs = "behaviour" leaves no mismatch to weigh': {"algorithm.old_logprobs": "behaviour"},
    'algorithm.mismatch is "off"': {"algorithm.mismatch": "off"},
    'algorithm.aggregation is not "constant_length"': {"algorithm.aggregation": "token_mean"},
    'trainer.backend is not "megatron"': {"trainer.backend": "fsdp"},
    'trainer.backend is not "fsdp"': {"trainer.backend": "megatron"},
    "trainer.tp is 1": {"trainer.backend": "megatron"},
    "trainer.pp is 1": {"trainer.backend": "megatron"},
    'trainer.names = "bridge" has maps of its own': {"trainer.backend": "megatron", "trainer.names": "bridge"},
    'engine.backend is "embedded"': {},
    "the server at engine.url runs already": {"engine.backend": "vllm", "engine.url": "http://host:8000"},
    'engine.backend is not "sglang"': {"engine.backend": "vllm"},
    'engine.backend is not "vllm"': {"engine.backend": "sglang"},
    'trainer.names = "bridge" streams whole tensors into the embedded engine, one after another': {
        "trainer.backend": "megatron",
        "trainer.names": "bridge",
    },
    'sync.transport is not "disk"': {"engine.backend": "sglang"},
    'sync.transport is not "http"': {"engine.backend": "sglang"},
    'sync.transport is neither "disk" nor "http", and the others send no byte that finding changes would save': {
        "engine.backend": "sglang"
    },
    "a server reads files with its own loader, after it has compared a digest of every tensor": {
        "engine.backend": "sglang",
        "sync.transport": "disk",
        "sync.directory": "/shared",
    },
    'trainer.schedule is "constant"': {"trainer.schedule": "constant"},
    "eval.source names the held-out prompts": {"eval.source": "org/held"},
    "nothing is held out: set data.heldout or eval.source": {"data.heldout": None},
    "data.source is not a reasoning_gym dataset": {},
    "reasoning_gym datasets have their own columns": {"data.source": "reasoning_gym:chain_sum"},
    "no Hugging Face dataset is read with it": {"data.source": "rows.jsonl"},
    "eval.source names no Hugging Face dataset": {},
    "data.chat is false": {"data.chat": False},
    "checkpoint.every is 0": {"checkpoint.every": 0},
    "sync.verify_every is 0": {},
    'mode.kind is not "fully_async"': {},
    'launch.backend is not "ray"': {},
    "mode.max_staleness = 0 begins nothing that could become stale": ASYNC | {"mode.max_staleness": 0},
    "trainer and engine have devices of their own": ASYNC | {"engine.backend": "sglang"},
    "the trainer's weights have moved on by the time that the engine could be asked": ASYNC,
    "no filter (rollout.top_p, top_k, min_p) is on": {"rollout.top_p": 1.0},
}
VALUES: dict[str, Any] = {
    "data.args": {"size": 5},
    "data.prompt_key": "p",
    "data.label_key": "l",
    "data.system": "s",
    "data.subset": "main",
    "data.template_args": {"enable_thinking": False},
    "eval.split": "test",
    "eval.subset": "main",
    "algorithm.dual_clip": 3.0,
    "sync.verify_bound": 0.1,
    "engine.url": "https://host",
    "engine.python": "/venv/bin/python",
    "launch.address": "10.0.0.1:6379",
    "engine.sglang": {"mem_fraction_static": 0.5},
    "engine.vllm": {"gpu_memory_utilization": 0.5},
    "model.map": "/maps/olmo.py",
    "sync.directory": "/shared",
    "sync.receivers": ("http://host:8100", "https://host:8101"),
    "trainer.pp_layers": (3, 2),
    "trainer.sequence_parallel": True,
    "eval.limit": 3,
    "algorithm.constant_length": 9,
    "data.heldout": 5,
    "rollout.allow_filtered_sampling": True,
}
CASES = [(rule.why, key) for rule in IGNORED for key in rule.keys]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if value is not None:
            raw.setdefault(section, {})[name] = value
    return raw


def test_every_rule_of_the_table_is_tested_below() -> None:
    assert {rule.why for rule in IGNORED} == set(CHANGES)
    assert {key for rule in IGNORED for key in rule.keys} <= set(keys())


@pytest.mark.parametrize(("why", "key"), CASES)
def test_a_key_that_would_be_ignored_is_an_error(why: str, key: str) -> None:
    value = VALUES.get(key, keys()[key].default)
    changed = BASE | CHANGES[why]
    without = nested({name: item for name, item in changed.items() if name != key})
    config_from_dict(without)
    with pytest.raises(ConfigError) as caught:
        config_from_dict(nested(changed | {key: value}))
    assert f"{key} is ignored because {why}; remove it or change that" in str(caught.value).splitlines()


MEGATRON = {"trainer.backend": "megatron", "trainer.pp": 2, "trainer.tp": 2}
SGLANG, VLLM = {"engine.backend": "sglang"}, {"engine.backend": "vllm"}
ELSEWHERE = {
    **{f"engine.{name}": SGLANG for name in ("tp", "url", "python", "start_timeout_s", "sglang")},
    "engine.vllm": VLLM,
    **{f"sync.{name}": SGLANG for name in ("transport", "write", "timeout_s")},
    "sync.verify_bound": {"sync.verify_every": 5},
    **{f"memory.{name}": SGLANG for name in ("release", "offload")},
    **{f"mode.{name}": ASYNC for name in ("max_staleness", "stale", "update")},
    **{f"placement.{name}": ASYNC for name in ("engines", "trainers", "lease_s")},
    "launch.address": ASYNC,
    "sync.directory": SGLANG | {"sync.transport": "disk"},
    "sync.receivers": SGLANG | {"sync.transport": "http"},
    "sync.delta": SGLANG | {"sync.transport": "disk", "sync.directory": "/shared"},
    **{f"trainer.{name}": MEGATRON for name in ("names", "tp", "pp", "vpp", "pp_layers", "ep", "etp")},
    "trainer.sequence_parallel": MEGATRON,
    "data.args": {"data.source": "reasoning_gym:chain_sum"},
    "eval.split": {"eval.source": "org/held", "data.heldout": None},
    "eval.subset": {"eval.source": "org/held", "data.heldout": None},
}
"""What to change in BASE, where a key does nothing, so that it does something."""


@pytest.mark.parametrize("key", sorted({key for _, key in CASES}))
def test_the_same_keys_are_accepted_where_they_do_something(key: str) -> None:
    value = VALUES.get(key, keys()[key].default)
    config = config_from_dict(nested(BASE | ELSEWHERE.get(key, {}) | {key: value}))
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            MEGATRON | {"trainer.pp_layers": (1, 2, 3)},
            r"trainer.pp_layers has 3 numbers and there are 2 stages \(trainer.pp x trainer.vpp\)",
        ),
        (MEGATRON | {"trainer.vpp": 2, "trainer.pp_layers": (1, 2)}, "has 2 numbers and there are 4 stages"),
        (MEGATRON | {"trainer.dtype": "float64"}, 'trainer.dtype = "float64" needs the fsdp trainer'),
        (MEGATRON | {"trainer.batching": "packed"}, 'trainer.batching = "packed" needs the fsdp trainer'),
        (SGLANG | {"sync.transport": "disk"}, 'sync.transport = "disk" needs sync.directory'),
        (VLLM | {"sync.transport": "http"}, 'sync.transport = "http" needs sync.receivers'),
        ({"mode.kind": "fully_async"}, 'set launch.backend = "ray"'),
        (
            ASYNC | VLLM | {"sync.transport": "disk", "sync.directory": "/shared"},
            'sync.transport = "disk" is not built',
        ),
        (ASYNC | MEGATRON | {"trainer.names": "bridge"}, 'trainer.names = "bridge" gives its weights only between'),
        (ASYNC | VLLM | {"engine.url": "http://host", "placement.engines": 2}, "engine.url names one server"),
        ({"rollout.allow_filtered_sampling": None}, "rollout.top_p filters the distribution"),
        ({"reward.weights": [1.0, 2.0]}, "reward.weights has 2 values for 1 functions"),
        (VLLM | {"rollout.temperature": 0.7}, "rollout.temperature is 0.7 and rollout.top_p filters: .*"),
        (VLLM | {"rollout.temperature": 0.7}, "set rollout.temperature = 1, switch off the filters, or take another"),
        (VLLM | {"eval.temperature": 0.7}, "eval.temperature is 0.7 and rollout.top_p filters"),
        (VLLM | {"rollout.temperature": 2.5}, "rollout.temperature is 2.5; vLLM takes at most 2"),
        (
            {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "trainer.updates_per_batch": 5},
            "trainer.updates_per_batch = 5 is more than the 2 prompts of a step",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_errors(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_dict(nested(BASE | change))


NO_FILTER = {"rollout.top_p": 1.0, "rollout.allow_filtered_sampling": None}


@pytest.mark.parametrize(
    "change",
    [
        VLLM,  # filters at temperature 1, and a greedy evaluation
        VLLM | NO_FILTER | {"rollout.temperature": 0.7, "eval.temperature": 2.0},
        SGLANG | {"rollout.temperature": 0.7, "eval.temperature": 3.0},
        {"rollout.temperature": 0.7},
        *(SGLANG | {"sync.transport": transport} for transport in ("auto", "ipc", "collective")),
        SGLANG | {"sync.transport": "disk", "sync.directory": "/shared", "sync.delta": True},
    ],
)
def test_engines_take_the_temperatures_and_transports_that_are_theirs(change: dict[str, Any]) -> None:
    config_from_dict(nested(BASE | change))


def test_an_adopted_server_keeps_the_keys_that_speak_of_how_it_is_used() -> None:
    change = {
        "engine.url": "http://host:8000",
        "engine.tp": 2,
        "engine.start_timeout_s": 5.0,
        "engine.max_sequences": 9,
    }
    assert config_from_dict(nested(BASE | SGLANG | change)).engine.tp == 2


def test_bridge_names_have_buckets_and_a_map_on_the_way_to_a_server() -> None:
    change = {"trainer.backend": "megatron", "trainer.names": "bridge", "model.map": "/maps/m.py"}
    change |= {"sync.extra_mib": 64, "sync.checksums": True, "sync.transport": "collective"}
    assert config_from_dict(nested(BASE | VLLM | change)).sync.extra_mib == 64


@pytest.mark.parametrize(
    ("backend", "batching", "packed"),
    [
        ("fsdp", "auto", True),
        ("fsdp", "packed", True),
        ("fsdp", "padded", False),
        ("megatron", "auto", False),
        ("megatron", "padded", False),
    ],
)
def test_rows_are_packed_where_the_trainer_takes_it(backend: str, batching: str, packed: bool) -> None:
    config = config_from_dict(nested(BASE | {"trainer.backend": backend, "trainer.batching": batching}))
    assert config.trainer.packed is packed


@pytest.mark.parametrize(
    ("data", "held", "taken"),
    [
        ("org/set", None, {"data"}),
        ("org/set", "org/held", {"data", "eval"}),
        ("org/set", "held.jsonl", {"data"}),
        ("rows.jsonl", None, set()),
        ("rows.parquet", "held.jsonl", set()),
        ("rows.json", "org/held", {"eval"}),
        ("reasoning_gym:chain_sum", None, set()),
        ("reasoning_gym:chain_sum", "directory", {"eval"}),
        ("reasoning_gym:chain_sum", "held.json-lines", set()),
    ],
)
@pytest.mark.parametrize("name", ["split", "subset"])
def test_splits_and_subsets_belong_to_the_source_that_is_a_dataset(
    name: str, data: str, held: str | None, taken: set[str]
) -> None:
    base = BASE | {"data.source": data, "eval.source": held, "data.heldout": None if held else 5}
    for section in ("data", "eval"):
        # Beside a key of its own, eval.source does not take that of [data].
        raw = nested(base | ({f"eval.{name}": "b"} if "eval" in taken else {}) | {f"{section}.{name}": "a"})
        if section in taken:
            assert getattr(getattr(config_from_dict(raw), section), name) == "a"
        else:
            with pytest.raises(ConfigError, match=rf"{section}\.{name} is ignored because"):
                config_from_dict(raw)


@pytest.mark.parametrize("name", ["split", "subset"])
def test_the_evaluation_dataset_takes_the_keys_of_data_when_it_has_none_of_its_own(name: str) -> None:
    config = config_from_dict(
        nested(BASE | {"data.source": "a.jsonl", "eval.source": "org/x", "data.heldout": None, f"data.{name}": "a"})
    )
    assert getattr(config.data, name) == "a"


def test_columns_are_named_for_the_evaluation_file_of_a_generated_source() -> None:
    change = {"data.source": "reasoning_gym:chain_sum", "eval.source": "held.jsonl", "data.heldout": None}
    assert config_from_dict(nested(BASE | change | {"data.prompt_key": "q"})).data.prompt_key == "q"


def test_the_clip_does_something_when_the_ratio_is_to_the_engine() -> None:
    change = {"trainer.updates_per_batch": 1, "algorithm.old_logprobs": "behaviour", "algorithm.clip_high": 0.3}
    assert config_from_dict(nested(BASE | change)).algorithm.clip_high == 0.3


def test_every_ignored_and_contradicting_key_is_named_at_once() -> None:
    change = {"algorithm.kl_coef": 0.0, "algorithm.kl_estimator": "k1", "data.split": "a", "data.source": "x.jsonl"}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(nested(BASE | change | {"reward.weights": [1.0, 2.0]}))
    named = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert named == ["algorithm.kl_estimator", "data.split", "reward.weights"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"trainer.backend": "megatron", "trainer.vpp": 2, "trainer.pp_layers": (1,)}, "trainer.pp_layers"),
        (
            {"trainer.backend": "megatron", "trainer.names": "bridge", "sync.transport": "ipc"},
            "sync.transport",
        ),
    ],
)
def test_a_key_that_is_ignored_contradicts_nothing_besides(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(nested(BASE | change))
    (line,) = (line for line in str(caught.value).splitlines() if line.startswith(f"{key} "))
    assert f"{key} is ignored because" in line


def test_the_rules_hold_for_a_config_made_in_python() -> None:
    with pytest.raises(ValueError, match="kl_estimator is ignored"):
        RunConfig.model_validate(nested(BASE | {"algorithm.kl_coef": 0.0, "algorithm.kl_estimator": "k1"}))
