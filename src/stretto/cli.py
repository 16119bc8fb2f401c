"""The command `stretto`. Its verbs parse, then call; what they call is imported only then."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import __version__
from stretto.exits import exit_code, speaks

if TYPE_CHECKING:
    from stretto.config import RunConfig

# The options of the verbs that take overrides of keys beside them.
_OPTIONS = {
    "train": ("--dry-run", "--resume", "--replay", "--help"),
    "rollout": (
        *("--model", "--prompts", "--out", "--reward", "--samples", "--max-new-tokens"),
        *("--temperature", "--limit", "--seed", "--chat", "--help"),
    ),
}
_SHORT = {"--launch": "--launch.backend"}
# What `stretto rollout` calls the keys of its configuration.
_ROLLOUT_FLAGS = {
    "model.path": "--model",
    "data.source": "--prompts",
    "data.limit": "--limit",
    "data.chat": "--chat",
    "reward.functions": "--reward",
    "rollout.samples_per_prompt": "--samples",
    "rollout.max_new_tokens": "--max-new-tokens",
    "rollout.temperature": "--temperature",
    "seed": "--seed",
}
_CONFIGURED = "Hugging Face directory, config.json, or hub name (of which only the configuration is fetched)"
_SIDES = """sides:
  megatron:tp=,pp=,vpp=,ep=,etp=,dp=   and pp_layers=8/8/7/..., vocab_divisor=, te, grouped
  fsdp:ranks=                          FSDP2
  checkpoint                           the files
  embedded:replicas=                   the embedded engine
  sglang:tp=,ep=,replicas=             and vllm likewise
Sizes that are left out are 1. Every side takes dtype=, for example fsdp:ranks=8,dtype=float32."""
_TRAINER_SIZES = {
    "tp": "tensor parallel size",
    "pp": "pipeline stages",
    "vpp": "model chunks a stage",
    "ep": "expert parallel size",
    "etp": "tensor parallel size of experts",
}
_ROLLOUT_SECTIONS = ("model", "data", "reward", "rollout", "engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` when None) and return its exit code: 0, 1 (failed run or bug), 2 (bad input)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _run(words))


def _run(words: list[str]) -> int:
    own, overrides = split_words(words) if words and words[0] in _OPTIONS else (words, [])
    args = _parser().parse_args(own, argparse.Namespace(overrides=overrides))
    return args.verb(args) or 0


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of `train` or `rollout` into its own and those of the overrides (`--a.b v`, `--a.b=v`)."""
    options = _OPTIONS[words[0]]
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _SHORT:
            name = _SHORT[name]
            word = name + equals + value
        if not word.startswith("--") or name in options:
            own.append(word)
            continue
        if close := get_close_matches(name, options, 1, 0.8):
            raise ValueError(f"unknown option {name}; did you mean {close[0]}?")
        overrides.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


class _VerbsHelp(argparse.HelpFormatter):
    """A column that the longest verb fits in."""

    def __init__(self, prog: str):
        super().__init__(prog)
        self._action_max_length = 14


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto",
        description="Reinforcement-learning post-training of language models.",
        formatter_class=_VerbsHelp,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_train(verbs)
    _add_rollout(verbs)
    _add_plan(verbs)
    _add_check(verbs)
    new_model = verbs.add_parser("new-model", help="begin the weight map of an architecture that has none")
    new_model.add_argument("model", metavar="MODEL", help=_CONFIGURED)
    new_model.add_argument("--out", metavar="FILE", type=Path, help="map file to write; MODEL_TYPE_map.py if left out")
    new_model.set_defaults(verb=_new_model)
    export = verbs.add_parser("export", help="write a checkpoint of a run as a Hugging Face directory")
    export.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    export.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="directory to write; it must not exist")
    export.add_argument("--step", metavar="N", type=int, help="step of the checkpoint; the newest when left out")
    export.set_defaults(verb=_export)
    doctor = verbs.add_parser("doctor", help="say what is installed, what can run here, and the fix for what cannot")
    doctor.set_defaults(verb=_doctor)
    return parser


class _TrainHelp(argparse.Action):
    """The usual help, then the keys of a run file, which only this one has to load."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from stretto.config.help import keys_help

        print(f"{parser.format_help()}\n{keys_help()}")
        parser.exit()


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser(
        "train",
        help="train a model as a run file says",
        usage="stretto train RUN.toml [--dry-run] [--replay ROLLOUTS.jsonl] [--SECTION.KEY VALUE]...\n"
        "       stretto train --resume RUN_DIR",
        add_help=False,
        allow_abbrev=False,
    )
    train.add_argument("-h", "--help", nargs=0, action=_TrainHelp, help="show this and every key of a run file")
    train.add_argument("run_file", metavar="RUN.toml", nargs="?", type=Path, help="the run file")
    train.add_argument("--dry-run", action="store_true", help="print what would run and its memory; touch nothing")
    train.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with a run from its newest checkpoint")
    train.add_argument("--replay", metavar="ROLLOUTS.jsonl", type=Path, help="train on recorded rollouts")
    train.set_defaults(verb=_train)


def _add_rollout(verbs: Any) -> None:
    rollout = verbs.add_parser(
        "rollout",
        help="generate and score without training",
        usage="stretto rollout --model M --prompts FILE [--reward SPEC]... [OPTION]... [--SECTION.KEY VALUE]...",
        epilog="Every key of model, data, reward, rollout and engine can be set too, for example --data.prompt_key q "
        "(stretto train --help lists them).",
        allow_abbrev=False,
    )
    rollout.add_argument("--model", metavar="M", required=True, help="Hugging Face directory, hub name, or smollm2")
    rollout.add_argument("--prompts", metavar="FILE", required=True, help="prompts, as data.source takes them")
    rollout.add_argument("--out", metavar="FILE", type=Path, help="JSON lines to write; standard output when left out")
    rollout.add_argument(
        "--reward",
        metavar="SPEC",
        action="append",
        help="module:function, file.py:function, math_verify or reasoning_gym; may be given again",
    )
    rollout.add_argument("--samples", metavar="N", type=int, help="samples of one prompt")
    rollout.add_argument("--max-new-tokens", metavar="N", type=int, help="longest response in tokens")
    rollout.add_argument("--temperature", metavar="T", type=float, help="sampling temperature")
    rollout.add_argument("--limit", metavar="N", type=int, help="use only the first N prompts")
    rollout.add_argument("--seed", metavar="S", type=int, help="seed of the samples")
    rollout.add_argument("--chat", action="store_true", default=None, help="wrap text prompts in the chat template")
    rollout.set_defaults(verb=_rollout)


def _add_plan(verbs: Any) -> None:
    plan = verbs.add_parser(
        "plan",
        help="say how weights go from one layout to another",
        description="How weights go from one layout to another, from a configuration alone.",
        epilog=_SIDES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument("model", metavar="MODEL", help=_CONFIGURED)
    plan.add_argument("--source", metavar="SIDE", required=True, help="who has the weights, such as megatron:tp=4,pp=2")
    plan.add_argument("--target", metavar="SIDE", required=True, help="who gets them, such as sglang:tp=2,replicas=4")
    plan.add_argument("--dtype", metavar="T", help="dtype of both sides; the configuration's when left out")
    plan.add_argument("--link", metavar="GB/S", type=float, default=50.0, help="10^9 bytes a second of a rank (50)")
    plan.add_argument("--colocate", action="store_true", help="rank r of both sides is the same device")
    plan.add_argument("--map", metavar="FILE", type=Path, help="Python file with the model's weight map")
    plan.add_argument("--json", action="store_true", help="print all numbers, each rank's and each link's, as JSON")
    plan.set_defaults(verb=_plan)


def _train(args: argparse.Namespace) -> None:
    if args.resume is not None:
        if args.run_file or args.dry_run or args.replay or args.overrides:
            raise ValueError("--resume goes on with the run's own configuration and takes nothing beside RUN_DIR")
        from stretto.orchestration.launch import resume

        resume(args.resume)
        return
    if args.run_file is None:
        raise ValueError("name a run file (stretto train RUN.toml) or a run to go on with (--resume RUN_DIR)")
    if args.dry_run and args.replay:
        raise ValueError("--dry-run reads no rollouts: leave out --replay or --dry-run")
    from stretto.config import load_config

    config = load_config(args.run_file, args.overrides)
    if args.dry_run:
        from stretto.orchestration.forecast import dry_run

        text = dry_run(config)
        if speaks():
            print(text)
    else:
        import stretto

        stretto.train(config, replay=args.replay)


def rollout_config(args: argparse.Namespace) -> RunConfig:
    """The configuration of the flags and overrides of `stretto rollout`.

    Raises ValueError in the words of the flags, or of the overrides.
    """
    from stretto.config import ConfigError, config_from_dict

    sampling = {
        "samples_per_prompt": args.samples,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
    }
    raw = _given(
        {
            "name": "rollout",
            "seed": args.seed,
            "model": {"path": args.model},
            "data": {"source": args.prompts, "limit": args.limit, "chat": args.chat, "shuffle": False},
            "reward": {"functions": args.reward or None},
            "rollout": sampling,
        }
    )
    overridden = _override(raw, args.overrides)
    if "reward.functions" not in overridden and not args.reward:
        if not args.prompts.startswith("reasoning_gym:"):
            raise ConfigError("say how answers are scored: --reward SPEC (see stretto rollout --help)")
        raw["reward"]["functions"] = ["reasoning_gym"]
    try:
        return config_from_dict(raw)
    except ConfigError as error:
        message = str(error)
        for key, flag in _ROLLOUT_FLAGS.items():
            if key not in overridden:
                message = message.replace(f"{key} ", f"{flag} ")
        raise ConfigError(message) from None


def _override(raw: dict[str, Any], arguments: Sequence[str]) -> set[str]:
    """Put the overrides `arguments` into `raw` and return their keys. Raises ValueError for one that does nothing."""
    from stretto.config.keys import find_key
    from stretto.config.overrides import assign, parse_value, split_overrides

    flags = {f"{section}.{name}" for section, table in raw.items() if isinstance(table, dict) for name in table}
    pairs = split_overrides(arguments)
    for name, text in pairs:
        known = find_key(name) is not None
        if known and name.partition(".")[0] not in _ROLLOUT_SECTIONS:
            raise ValueError(f"--{name} does nothing in stretto rollout, which reads {', '.join(_ROLLOUT_SECTIONS)}")
        if name in flags:
            by = _ROLLOUT_FLAGS.get(name, "stretto rollout itself")
            raise ValueError(f"--{name} is already set by {by}; leave one of them out")
        assign(raw, name, parse_value(name, text) if known else text)
    return {name for name, _ in pairs}


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` without the flags that were not given."""
    return {
        name: _given(value) if isinstance(value, dict) else value for name, value in raw.items() if value is not None
    }


def _rollout(args: argparse.Namespace) -> None:
    config = rollout_config(args)
    from stretto.orchestration.launch import rollout

    rollout(config, args.out)


def _plan(args: argparse.Namespace) -> None:
    from stretto.sync.report import planned, print_report

    report = planned(
        args.model,
        args.source,
        args.target,
        dtype=args.dtype,
        gigabytes_per_second=args.link,
        colocate=args.colocate,
        map_file=args.map,
    )
    print_report(report, as_json=args.json)


def _new_model(args: argparse.Namespace) -> None:
    from stretto.orchestration.new_model import new_model

    print(new_model(args.model, args.out))


def _add_check(verbs: Any) -> None:
    check = verbs.add_parser(
        "check",
        help="say whether a model is integrated, and if not, which parameter is wrong",
        epilog="A ladder: family, names and shapes, plan, round trip, logits, gradients, engine, one step and sync, "
        "memory. It stops at the first broken rung, with exit code 1.",
        allow_abbrev=False,
    )
    check.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint directory, config.json, smollm2 or hub name; above 500 million "
        "parameters, or without weights here, a few layers with random weights are checked",
    )
    check.add_argument("--trainer", choices=("fsdp", "megatron"), default="fsdp", help="who trains (fsdp)")
    for size, what in _TRAINER_SIZES.items():
        check.add_argument(f"--{size}", metavar="N", type=_positive, default=1, help=f"Megatron: {what}")
    check.add_argument("--dp", metavar="N", type=_positive, default=0, help="data parallel ranks (as few as it takes)")
    check.add_argument("--sp", action="store_true", help="Megatron: sequence parallel")
    check.add_argument("--names", choices=("raw", "bridge"), default="raw", help="Megatron: whose names (raw)")
    check.add_argument("--engine", choices=("embedded", "sglang", "vllm"), default="embedded", help="(embedded)")
    check.add_argument("--engine-tp", metavar="N", type=_positive, default=1, help="tensor parallel size of the engine")
    check.add_argument("--live", action="store_true", help="start a server of the engine and hold it to the trainer")
    check.add_argument("--engine-python", metavar="PYTHON", help="interpreter of that server (this one)")
    check.add_argument(
        "--engine-option",
        metavar="NAME=VALUE",
        type=_option,
        action="append",
        default=[],
        help="one of that server's own options, by its Python name",
    )
    check.add_argument("--map", metavar="FILE", help="Python file with the map of a family that is not shipped")
    check.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute (float32)")
    check.add_argument("--layers", metavar="N", type=_positive, default=0, help="layers of the probe")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.set_defaults(verb=_check)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("a whole number of at least 1")
    return int(text)


def _option(text: str) -> tuple[str, Any]:
    """A server's option, whose value is JSON or else the text as it is."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError("NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _check(args: argparse.Namespace) -> int:
    from stretto.orchestration.check import CheckSettings, check

    report = check(
        CheckSettings(
            model=args.model,
            trainer=args.trainer,
            engine=args.engine,
            **{name: getattr(args, name) for name in (*_TRAINER_SIZES, "dp")},
            sequence_parallel=args.sp,
            names=args.names,
            engine_tp=args.engine_tp,
            map_file=args.map,
            dtype=args.dtype,
            layers=args.layers,
            live=args.live,
            engine_python=args.engine_python,
            engine_options=dict(args.engine_option),
        )
    )
    if args.json:
        print(report.to_json())
    else:
        from rich.console import Console

        report.show(Console())
    return 0 if report.passed else 1


def _export(args: argparse.Namespace) -> None:
    from stretto.orchestration.export import export

    export(args.run_dir, args.out_dir, args.step)


def _doctor(args: argparse.Namespace) -> int:
    from stretto.doctor import can_train, render, report

    checks = report()
    print(render(checks))
    return 0 if can_train(checks) else 1
