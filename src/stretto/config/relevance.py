"""Keys that the chosen parts would ignore are errors (DESIGN, rule 7), as are keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from stretto.config.contradictions import contradictions, filters_of, streams_here, through_files

if TYPE_CHECKING:
    from stretto.config.run import RunConfig

_FILES = (".jsonl", ".json-lines", ".json", ".parquet")
_OF_SERVERS = (
    *(f"engine.{key}" for key in ("tp", "url", "python", "start_timeout_s", "sglang", "vllm")),
    *(f"sync.{key}" for key in ("transport", "directory", "receivers", "delta", "write", "timeout_s")),
)
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
    Rule(("trainer.compile",), lambda c: c.trainer.backend != "fsdp", 'trainer.backend is not "fsdp"'),
    Rule(("trainer.sequence_parallel",), lambda c: c.trainer.tp == 1, "trainer.tp is 1"),
    Rule(("trainer.vpp", "trainer.pp_layers"), lambda c: c.trainer.pp == 1, "trainer.pp is 1"),
    Rule(
        ("model.map",),
        streams_here,
        'trainer.names = "bridge" has maps of its own',
    ),
    Rule(
        (
            *_OF_SERVERS,
            "memory.release",
            "memory.offload",
            *(f"sync.{key}" for key in ("transport", "write", "timeout_s", "directory", "receivers", "delta")),
        ),
        lambda c: c.engine.backend == "embedded",
        'engine.backend is "embedded"',
    ),
    Rule(
        ("engine.python", "engine.sglang", "engine.vllm", "memory.release", "memory.offload"),
        lambda c: c.engine.url is not None,
        "the server at engine.url runs already",
    ),
    Rule(("engine.sglang",), lambda c: c.engine.backend != "sglang", 'engine.backend is not "sglang"'),
    Rule(("engine.vllm",), lambda c: c.engine.backend != "vllm", 'engine.backend is not "vllm"'),
    Rule(
        ("sync.extra_mib", "sync.checksums"),
        streams_here,
        'trainer.names = "bridge" streams whole tensors into the embedded engine, one after another',
    ),
    Rule(("sync.directory",), lambda c: c.sync.transport != "disk", 'sync.transport is not "disk"'),
    Rule(("sync.receivers",), lambda c: c.sync.transport != "http", 'sync.transport is not "http"'),
    Rule(
        ("sync.delta",),
        lambda c: not through_files(c),
        'sync.transport is neither "disk" nor "http", and the others send no byte that finding changes would save',
    ),
    Rule(
        ("sync.write", "sync.checksums"),
        through_files,
        "a server reads files with its own loader, after it has compared a digest of every tensor",
    ),
    Rule(
        ("mode.max_staleness", "mode.stale", "mode.update", "placement.engines", "placement.lease_s"),
        lambda c: c.mode.kind != "fully_async",
        'mode.kind is not "fully_async"',
    ),
    Rule(("launch.address", "placement.trainers"), lambda c: c.launch.backend != "ray", 'launch.backend is not "ray"'),
    Rule(
        ("memory.release", "memory.offload"),
        lambda c: c.mode.kind == "fully_async",
        "trainer and engine have devices of their own",
    ),
    Rule(
        ("mode.stale",),
        lambda c: c.mode.max_staleness == 0,
        "mode.max_staleness = 0 begins nothing that could become stale",
    ),
    Rule(
        ("sync.verify_every", "sync.verify_bound"),
        lambda c: c.mode.kind == "fully_async",
        "the trainer's weights have moved on by the time that the engine could be asked",
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
    Rule(("sync.verify_bound",), lambda c: c.sync.verify_every == 0, "sync.verify_every is 0"),
    Rule(
        ("rollout.allow_filtered_sampling",),
        lambda c: not filters_of(c),
        "no filter (rollout.top_p, top_k, min_p) is on",
    ),
)


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
    if problems := [*_set_but_ignored(config), *contradictions(config)]:
        raise ValueError("\n".join(problems))


def _set_but_ignored(config: RunConfig) -> Iterator[str]:
    named: set[str] = set()
    for rule in IGNORED:
        for key in rule.keys:
            section, _, name = key.partition(".")
            if key not in named and name in getattr(config, section).model_fields_set and rule.ignored(config):
                named.add(key)
                yield f"{key} is ignored because {rule.why}; remove it or change that"
