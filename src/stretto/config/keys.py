"""Every dotted key of a run file: its type, what it accepts, its default and its sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stretto.config.run import RunConfig
from stretto.config.sections import Section

_NOUNS = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a table"}
_PLURALS = {str: "texts", int: "integers", float: "numbers"}
# What other libraries call our keys (TRL, verl, slime, transformers, Megatron, SGLang, vLLM): names that no likeness
# would find. A name with a section means something else there.
_ELSEWHERE = {
    "learning_rate": "trainer.lr",
    "beta": "algorithm.kl_coef",
    "num_generations": "rollout.samples_per_prompt",
    "n": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "max_grad_norm": "trainer.clip_grad",
    "lr_scheduler_type": "trainer.schedule",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "strategy": "trainer.backend",
    "tensor_model_parallel_size": "trainer.tp",
    "tensor_parallel_size": "trainer.tp",
    "pipeline_model_parallel_size": "trainer.pp",
    "pipeline_parallel_size": "trainer.pp",
    "virtual_pipeline_model_parallel_size": "trainer.vpp",
    "num_virtual_stages_per_pipeline_rank": "trainer.vpp",
    "pipeline_model_parallel_layout": "trainer.pp_layers",
    "expert_model_parallel_size": "trainer.ep",
    "expert_parallel_size": "trainer.ep",
    "expert_tensor_parallel_size": "trainer.etp",
    "use_remove_padding": "trainer.batching",
    "update_weights_bucket_megabytes": "sync.extra_mib",
    "engine.tensor_parallel_size": "engine.tp",
    "engine.tensor_model_parallel_size": "engine.tp",
    "rollout.tensor_model_parallel_size": "engine.tp",
    "tp_size": "engine.tp",
    "rollout_num_gpus_per_engine": "engine.tp",
    "vllm_tensor_parallel_size": "engine.tp",
    "vllm_server_base_url": "engine.url",
    "max_num_seqs": "engine.max_sequences",
    "max_running_requests": "engine.max_sequences",
    "mem_fraction_static": "engine.sglang",
    "gpu_memory_utilization": "engine.vllm",
    "vllm_gpu_memory_utilization": "engine.vllm",
}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """One key. `annotation` is its type without `| None`; `accepts` is that in words, with its range or choices."""

    name: str
    annotation: Any
    accepts: str
    required: bool
    default: Any
    sentence: str


@cache
def sections() -> dict[str, type[Section]]:
    """The sections of a run file by name, in their order."""
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, Section)}


@cache
def keys() -> dict[str, Key]:
    """All keys by dotted name, in the order of the file: first those without a section."""
    top = {name: field for name, field in RunConfig.model_fields.items() if name not in sections()}
    below = {
        f"{section}.{name}": field
        for section, model in sections().items()
        for name, field in model.model_fields.items()
    }
    return {name: _key(name, field) for name, field in (top | below).items()}


def find_key(name: str) -> Key | None:
    """The key called `name`, or the key of the table that `name` is an entry of (`data.args.size`), or None."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        key = keys().get(".".join(parts[:end]))
        if key is not None:
            return key if end == len(parts) or get_origin(key.annotation) is dict else None
    return None


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The `count` candidates most like `name`, best first; a match of the last part alone counts almost as much.

    A name that another library uses for one of the candidates is like nothing more than that one.
    """

    def likeness(candidate: str) -> float:
        if _ELSEWHERE.get(name, _ELSEWHERE.get(_leaf(name))) == candidate:
            return 2.0
        whole = SequenceMatcher(None, name, candidate).ratio()
        return max(whole, 0.95 * SequenceMatcher(None, _leaf(name), _leaf(candidate)).ratio())

    return sorted(candidates, key=likeness, reverse=True)[:count]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _key(name: str, field: FieldInfo) -> Key:
    annotation = _without_none(field.annotation)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    words = _words(annotation, field.metadata)
    return Key(name, annotation, words, field.is_required(), default, field.description or "")


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (argument for argument in get_args(annotation) if argument is not NoneType)
    return annotation


def _words(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is list:
        return f"a list of {_PLURALS[arguments[0]]}" + _limits(metadata)
    if origin is tuple:
        item, *rules = get_args(arguments[0]) if get_origin(arguments[0]) is Annotated else (arguments[0],)
        inner = [part for rule in rules for part in getattr(rule, "metadata", [rule])]
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {count}{_PLURALS[item]}" + _limits(inner)
    return _NOUNS[origin or annotation] + _limits(metadata)


def _limits(metadata: Sequence[Any]) -> str:
    """The constraints of a field in words, for example " >= 0 and < 1"."""
    found = [
        f"{sign} {getattr(rule, name)}" for rule in metadata for name, sign in _BOUNDS.items() if hasattr(rule, name)
    ]
    found += ["that is not empty" for rule in metadata if getattr(rule, "min_length", None)]
    found += [f"like {rule.pattern}" for rule in metadata if getattr(rule, "pattern", None)]
    return " " + " and ".join(found) if found else ""
