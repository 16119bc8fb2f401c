"""Keys that the chosen parts would ignore, and keys that contradict each other, are errors (DESIGN, rule 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stretto.config.run import RunConfig
    from stretto.config.sections import TrainerConfig

_FILES = (".jsonl", ".json-lines", ".json", ".parquet")
_NO_DATASET = "no Hugging Face dataset is read with it"


class Rule(NamedTuple):
    """`keys` do nothing while `ignored` holds; `why` completes the sentence "is ignored because ..."."""

    keys: tuple[str, ...]
    ignored: Callable[[RunConfig], bool]
    why: str


IGNORED: tuple[Rule, ...] = (
    Rule(("algorithm.kl_estimator",), lambda c: c.algorithm.kl_coef == 0, "algorithm.kl_coef is 0"),
    Rule(
        ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"),
        lambda c: c.trainer.updates_per_batch == 1 and c.algorithm.old_logprobs == "trainer",
        'with trainer.updates_per_batch = 1 and algorithm.old_logprobs = "trainer" the ratio is exactly 1',
    ),
    Rule(
        ("algorithm.mismatch", "algorithm.mismatch_cap"),
        lambda c: c.algorithm.old_logprobs == "behaviour",
        'algorithm.old_logprobs = "behaviour" leaves no mismatch to weigh',
    ),
    Rule(("algorithm.mismatch_cap",), lambda c: c.algorithm.mismatch == "off", 'algorithm.mismatch is "off"'),
    Rule(
        ("algorithm.constant_length",),
        lambda c: c.algorithm.aggregation != "constant_length",
        'algorithm.aggregation is not "constant_length"',
    ),
    Rule(
        tuple(f"trainer.{key}" for key in ("names", "tp", "pp", "vpp", "pp_layers", "ep", "etp", "sequence_parallel")),
        lambda c: c.trainer.backend != "megatron",
        'trainer.backend is not "megatron"',
    ),
    Rule(("trainer.sequence_parallel",), lambda c: c.trainer.tp == 1, "trainer.tp is 1"),
    Rule(("trainer.vpp", "trainer.pp_layers"), lambda c: c.trainer.pp == 1, "trainer.pp is 1"),
    Rule(
        ("model.map",),
        lambda c: c.trainer.backend == "megatron" and c.trainer.names == "bridge",
        'trainer.names = "bridge" has maps of its own',
    ),
    Rule(
        ("sync.extra_mib",),
        lambda c: c.trainer.backend == "megatron" and c.trainer.names == "bridge",
        'trainer.names = "bridge" streams whole tensors, one after another',
    ),
    Rule(("trainer.min_lr_ratio",), lambda c: c.trainer.schedule == "constant", 'trainer.schedule is "constant"'),
    Rule(("data.heldout",), lambda c: c.eval.source is not None, "eval.source names the held-out prompts"),
    Rule(
        ("eval.every", "eval.limit", "eval.samples", "eval.temperature"),
        lambda c: c.eval.source is None and c.data.heldout == 0,
        "nothing is held out: set data.heldout or eval.source",
    ),
    Rule(
        ("data.args",),
        lambda c: not c.data.source.startswith("reasoning_gym:"),
        "data.source is not a reasoning_gym dataset",
    ),
    Rule(
        ("data.format", "data.prompt_key", "data.label_key"),
        lambda c: all(source.startswith("reasoning_gym:") for source in _sources(c)),
        "reasoning_gym datasets have their own columns",
    ),
    Rule(("data.split",), lambda c: not _reads_from_data(c, c.eval.split), _NO_DATASET),
    Rule(("data.subset",), lambda c: not _reads_from_data(c, c.eval.subset), _NO_DATASET),
    Rule(
        ("eval.split", "eval.subset"),
        lambda c: c.eval.source is None or not _is_dataset(c.eval.source),
        "eval.source names no Hugging Face dataset",
    ),
    Rule(("data.system", "data.template_args"), lambda c: c.data.chat is False, "data.chat is false"),
    Rule(("checkpoint.keep",), lambda c: c.checkpoint.every == 0, "checkpoint.every is 0"),
    Rule(
        ("rollout.allow_filtered_sampling",),
        lambda c: not filters_of(c),
        "no filter (rollout.top_p, top_k, min_p) is on",
    ),
)


def filters_of(config: RunConfig) -> list[str]:
    """The sampling filters that are switched on, by key."""
    rollout = config.rollout
    on = {"rollout.top_p": rollout.top_p < 1, "rollout.top_k": rollout.top_k > 0, "rollout.min_p": rollout.min_p > 0}
    return [key for key, value in on.items() if value]


def _sources(config: RunConfig) -> list[str]:
    return [source for source in (config.data.source, config.eval.source) if source is not None]


def _is_dataset(source: str) -> bool:
    """Whether `source` is a Hugging Face dataset (a directory or a name): neither generated nor a file."""
    return not source.startswith("reasoning_gym:") and not source.endswith(_FILES)


def _reads_from_data(config: RunConfig, own: str | None) -> bool:
    """Whether a dataset is read with a key of [data] that eval.source may have of its `own`."""
    held = config.eval.source
    return _is_dataset(config.data.source) or (held is not None and _is_dataset(held) and own is None)


def ignored_keys(config: RunConfig) -> set[str]:
    """The keys that the chosen parts would ignore, set or not."""
    return {key for rule in IGNORED if rule.ignored(config) for key in rule.keys}


def check_relevance(config: RunConfig) -> None:
    """Raise ValueError with a line for each key that is set but ignored, and for each that contradicts another."""
    if problems := [*_set_but_ignored(config), *_contradictions(config)]:
        raise ValueError("\n".join(problems))


def _set_but_ignored(config: RunConfig) -> Iterator[str]:
    named: set[str] = set()
    for rule in IGNORED:
        for key in rule.keys:
            section, _, name = key.partition(".")
            if key not in named and name in getattr(config, section).model_fields_set and rule.ignored(config):
                named.add(key)
                yield f"{key} is ignored because {rule.why}; remove it or change that"


def _contradictions(config: RunConfig) -> Iterator[str]:
    if (on := filters_of(config)) and not config.rollout.allow_filtered_sampling:
        yield (
            f"{on[0]} filters the distribution that tokens are drawn from, so the importance ratio is biased; "
            "set rollout.allow_filtered_sampling = true to train on such samples"
        )
    weights = config.reward.weights
    if weights is not None and len(weights) != len(config.reward.functions):
        yield f"reward.weights has {len(weights)} values for {len(config.reward.functions)} functions"
    updates, prompts = config.trainer.updates_per_batch, config.rollout.prompts_per_step
    if updates > prompts:
        yield f"trainer.updates_per_batch = {updates} is more than the {prompts} prompts of a step"
    yield from _megatron_contradictions(config.trainer)


def _megatron_contradictions(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.backend != "megatron":
        return
    stages = trainer.pp * trainer.vpp
    if trainer.pp_layers and stages > 1 and len(trainer.pp_layers) != stages:
        yield (
            f"trainer.pp_layers has {len(trainer.pp_layers)} numbers and there are {stages} stages "
            "(trainer.pp x trainer.vpp)"
        )
    if trainer.dtype == "float64":
        yield (
            'trainer.dtype = "float64" needs the fsdp trainer: the optimizer of megatron is float32; '
            'set "auto", "float32" or "bfloat16"'
        )
    if trainer.packed:
        yield (
            'trainer.batching = "packed" needs the fsdp trainer: the attention of Megatron\'s local layers has no mask '
            'for packed rows; set "padded" or leave it out'
        )
