"""Calls a reward function with the signature it has: TRL's, verl's, or a plain one per sample.

The parameter names decide: `solution_str` is verl's; `prompts`, `completions` (or nothing but `completion_ids` and
`**kwargs`) is TRL's, called once for a group with lists; everything else is called per sample with the columns it
names. Each may be async.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.rewards.outcomes import Outcome, group_outcomes, one_outcome, raised
from stretto.rewards.sample import Sample
from stretto.types import Failure

_GROUP_NAMES = frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"})
_SAMPLE_NAMES = frozenset({"prompt", "completion", "completion_ids", "messages"})
_VERL_NAMES = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


@dataclass(frozen=True)
class Adapter:
    """A reward function and how it is called. `style` is "trl", "verl" or "sample"."""

    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    style: str
    reward: str

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError naming the first parameter that these columns leave without a value."""
        there = self._names(columns)
        for parameter in self.parameters:
            if _needs_value(parameter) and parameter.name not in there:
                raise ValueError(
                    f"reward {self.reward} asks for `{parameter.name}`, {_why_not(parameter.name, there, columns)}"
                )

    def score(self, samples: Sequence[Sample]) -> list[Outcome] | Failure:
        """One outcome per sample. A lone Failure: the call for the whole group failed, nobody knows by whose fault.

        Raises ValueError for a parameter that no column supplies.
        """
        columns = set(samples[0].fields).intersection(*(sample.fields for sample in samples))
        self.check_columns(columns)
        if self.style == "trl":
            return self._score_group(samples, columns)
        values = self._call_each([self._sample_supply(sample) for sample in samples])
        if self.style == "verl":
            values = [_verl_score(value, self.reward) for value in values]
        return [one_outcome(value, self.reward) for value in values]

    def _names(self, columns: Collection[str]) -> Collection[str]:
        if self.style == "trl":
            return _GROUP_NAMES | set(columns)
        if self.style == "sample":
            return _SAMPLE_NAMES | set(columns)
        alias = {"ground_truth"} if "answer" in columns else set()
        return {"solution_str", "extra_info"} | alias | (_VERL_NAMES & set(columns))

    def _score_group(self, samples: Sequence[Sample], columns: Collection[str]) -> list[Outcome] | Failure:
        supply: dict[str, Any] = {name: [sample.fields[name] for sample in samples] for name in sorted(columns)}
        supply["prompts"] = [_trl_prompt(sample) for sample in samples]
        supply["completions"] = [_trl_completion(sample) for sample in samples]
        supply["completion_ids"] = [list(sample.completion_ids) for sample in samples]
        supply["log_extra"] = supply["log_metric"] = _log_nowhere
        (values,) = self._call_each([supply])
        if isinstance(values, Failure):
            return values
        return group_outcomes(values, len(samples), self.reward)

    def _sample_supply(self, sample: Sample) -> dict[str, Any]:
        fields = sample.fields
        if self.style == "verl":
            supply = {name: fields[name] for name in _VERL_NAMES & set(fields)}
            if "ground_truth" not in supply and "answer" in fields:
                supply["ground_truth"] = fields["answer"]
            return {"extra_info": None} | supply | {"solution_str": sample.completion}
        own = {"prompt": sample.prompt, "completion": sample.completion, "messages": sample.messages}
        return {**fields, **own, "completion_ids": list(sample.completion_ids)}

    def _call_each(self, supplies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What the calls returned, an exception as its Failure; async ones run concurrently."""
        values = [self._call(supply) for supply in supplies]
        if any(inspect.isawaitable(value) for value in values):
            return asyncio.run(self._await_all(values))
        return values

    def _call(self, supply: Mapping[str, Any]) -> Any:
        positional, keywords = _bind(self.parameters, supply)
        try:
            return self.function(*positional, **keywords)
        except BaseException as error:
            return raised(error, self.reward)

    async def _await_all(self, values: Sequence[Any]) -> list[Any]:
        async def settle(value: Awaitable[Any] | Any) -> Any:
            try:
                return await value if inspect.isawaitable(value) else value
            except BaseException as error:
                return raised(error, self.reward)

        return await asyncio.gather(*(settle(value) for value in values))


def adapt(function: Callable[..., Any], reward: str) -> Adapter:
    """The adapter of `function`, named `reward` in messages. Raises ValueError when it tells no signature."""
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {reward} tells no signature; wrap it in a Python function") from error
    return Adapter(function, parameters, _style(parameters), reward)


def _style(parameters: Sequence[inspect.Parameter]) -> str:
    names = {parameter.name for parameter in parameters}
    if "solution_str" in names:
        return "verl"
    if names & {"prompts", "completions"}:
        return "trl"
    if names & {"prompt", "completion", "messages"}:
        return "sample"
    # TRL passes everything by keyword, so a function that takes only what it needs from **kwargs is one of TRL's.
    keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return "trl" if keywords or "completion_ids" in names else "sample"


def _needs_value(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not variadic and parameter.default is parameter.empty


def _why_not(name: str, there: Collection[str], columns: Collection[str]) -> str:
    """The rest of the sentence that says that a reward cannot have `name`."""
    if name == "trainer_state":
        return (
            "but rewards run in worker processes, which have no trainer; give the parameter a default, or leave it out"
        )
    near = difflib.get_close_matches(name, there, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    available = sorted(there, key=lambda one: (one not in columns, one))
    return f"but it can only have {', '.join(available)}{hint}; rename one, or give the parameter a default"


def _log_nowhere(*_args: Any, **_keywords: Any) -> None:
    """TRL hands out `log_extra` and `log_metric` for its own logs, which a worker does not have."""


def _bind(parameters: Sequence[inspect.Parameter], supply: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a call: what the function names, and the rest too when it takes ``**kwargs``."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    named = {parameter.name for parameter in parameters}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords |= {name: value for name, value in supply.items() if name not in named}
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(supply.get(parameter.name, parameter.default))
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name in supply:
            keywords[parameter.name] = supply[parameter.name]
    return positional, keywords


def _trl_prompt(sample: Sample) -> Any:
    return sample.prompt if sample.messages is None else [dict(message) for message in sample.messages]


def _trl_completion(sample: Sample) -> Any:
    return sample.completion if sample.messages is None else [{"role": "assistant", "content": sample.completion}]


def _verl_score(value: Any, reward: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        return Failure("wrong_type", reward, f'expected a dict with "score", got the keys {sorted(map(str, value))}')
    return value["score"]
