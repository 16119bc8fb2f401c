"""The sections of the report, each a function from a run to HTML; empty when the run has nothing for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stretto.telemetry.charts import line_chart, points_of, stacked_bar
from stretto.telemetry.formatting import clock, html_text, number
from stretto.telemetry.metrics import PART_PREFIX, describe
from stretto.telemetry.rundata import Pair, RunData, Series, eval_samples

_CURVES = (
    "reward/mean", "eval/score", "rollout/response_length_mean", "train/entropy", "train/grad_norm",
    "train/clip_fraction", "train/kl_reference", "mismatch/kl", "mismatch/logprob_diff_max", "tokens/per_s",
    "rollout/tokens_per_s", "train/loss", "train/lr", "reward/zero_variance_share", "rollout/truncated_share",
    "reward/failed_share", "train/skipped_steps", "memory/peak_bytes",
)  # fmt: skip
_SPREADS = {"reward/mean": "reward/std"}
_PHASES = ("rollout", "reward", "train", "sync", "eval", "checkpoint")
_SHOWN_SAMPLES = 12


def headline(run: RunData) -> str:
    """Tiles: held-out score before and after, steps, wall time, tokens."""
    tiles = [_score_tile(run.series["eval/score"])] if "eval/score" in run.series else []
    tiles.append(_tile(f"{run.steps[1]:,}", "step" if run.steps[1] == 1 else "steps"))
    if (seconds := run.total("time/step")) is not None:
        tiles.append(_tile(clock(seconds), "wall time"))
    if "tokens/trained" in run.series:
        tiles.append(_tile(number(_last(run.series["tokens/trained"])), "response tokens trained on"))
    if "tokens/per_s" in run.series:
        speeds = run.series["tokens/per_s"].values()
        tiles.append(_tile(number(sum(speeds) / len(speeds)), "tokens a second, mean over steps"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _score_tile(scores: Series) -> str:
    steps = list(scores)
    first, last = scores[steps[0]], scores[steps[-1]]
    if len(steps) == 1:
        return _tile(number(first), f"held-out score, step {steps[0]}", "wide")
    best = max(scores, key=lambda step: scores[step] if math.isfinite(scores[step]) else -math.inf)
    tone = "good" if last > first else "bad" if last < first else ""
    value = f'{number(first)} → <span class="{tone}">{number(last)}</span>'
    return _tile(
        value, f"held-out score, step {steps[0]} → {steps[-1]} (best {number(scores[best])} at step {best})", "wide"
    )


def _tile(value: str, label: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{value}</b><span>{label}</span></div>'


def _last(series: Series) -> float:
    return next(reversed(series.values()))


def curves(run: RunData) -> str:
    """A chart for each curve that has a value, reward parts included."""
    parts = sorted(name for name in run.series if name.startswith(PART_PREFIX))
    figures = [_figure(run, name) for name in (*_CURVES, *parts) if name in run.series]
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>' if figures else ""


def _figure(run: RunData, name: str) -> str:
    series, metric = run.series[name], describe(name)
    spreads = run.series.get(_SPREADS.get(name, ""), {})
    points = points_of(series, spreads)
    broken = sum(not math.isfinite(value) for value in series.values())
    caption = f"<h3>{html_text(metric.title)}<span>{number(_last(series))}</span></h3>{html_text(metric.sentence)}"
    if spreads:
        caption += " The band is one standard deviation."
    if broken:
        caption += f' <b class="bad">Not finite at {broken} of {len(series)} steps.</b>'
    chart = line_chart(points, run.steps, metric.title) if points else ""
    return f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"


def phases(run: RunData) -> str:
    """Where the seconds went: one stacked bar and its numbers."""
    seconds = {phase: run.total(f"time/{phase}") or 0.0 for phase in _PHASES}
    colours = {phase: f"p{index}" for index, phase in enumerate(_PHASES, start=1)}
    seconds["other"] = max(0.0, (run.total("time/step") or 0.0) - sum(seconds.values()))
    colours["other"] = "p7"
    seconds = {phase: amount for phase, amount in seconds.items() if amount > 0}
    if not (total := sum(seconds.values())):
        return ""
    titles = {phase: describe(f"time/{phase}").title if phase != "other" else "Everything else" for phase in seconds}
    rows = [
        f'<tr><td><span class="key {colours[phase]}"></span>{titles[phase]}</td>'
        f'<td class="n">{clock(amount)}</td><td class="n">{amount / total:.1%}</td></tr>'
        for phase, amount in seconds.items()
    ]
    rows.append(f'<tr class="sum"><td>Total</td><td class="n">{clock(total)}</td><td class="n"></td></tr>')
    bar = stacked_bar([(titles[phase], amount) for phase, amount in seconds.items()], [colours[p] for p in seconds])
    return f'<h2>Where the time went</h2><div class="card">{bar}<table>{"".join(rows)}</table></div>'


def tokens(run: RunData) -> str:
    """Generated = trained + dropped + in flight, checked at every step that has all four."""
    kinds = ("generated", "trained", "dropped", "in_flight")
    columns = [run.series.get(f"tokens/{kind}", {}) for kind in kinds]
    steps = [step for step in columns[0] if all(step in column for column in columns)]
    if not steps:
        return ""
    gaps = [columns[0][step] - sum(column[step] for column in columns[1:]) for step in steps]
    rows = [
        f'<tr><td>{describe(f"tokens/{kind}").title}</td><td class="n">{column[steps[-1]]:,.0f}</td>'
        f'<td class="soft">{describe(f"tokens/{kind}").sentence}</td></tr>'
        for kind, column in zip(kinds, columns, strict=True)
    ]
    wrong = sum(gap != 0 for gap in gaps)
    verdict = (
        f'<span class="bad">They do not add up at {wrong} of {len(steps)} steps.</span>'
        if wrong
        else f'<span class="good">They add up at all {len(steps)} steps.</span>'
    )
    rows.append(
        f'<tr class="sum"><td>Generated − the rest</td><td class="n">{gaps[-1]:,.0f}</td><td>{verdict}</td></tr>'
    )
    return f'<h2>Tokens</h2><div class="card"><table>{"".join(rows)}</table></div>'


def samples(run: RunData) -> str:
    """Held-out answers before and after, side by side; without a second evaluation, the answers there are."""
    pairs, single = eval_samples(run)
    if pairs:
        better, worse = sum(pair.change > 0 for pair in pairs), sum(pair.change < 0 for pair in pairs)
        lead = (
            f"Of {len(pairs)} recorded held-out samples, {better} got a higher reward, {worse} a lower one, "
            f"{len(pairs) - better - worse} the same."
        )
        body = "".join(_pair(pair) for pair in pairs[:_SHOWN_SAMPLES])
        return _samples_section("Held-out samples, before and after", lead, len(pairs), body)
    chosen = single or [record for record in run.samples if record["step"] == run.samples[-1]["step"]]
    if not chosen:
        return ""
    title = "Held-out samples" if single else "Training samples of the last step"
    return _samples_section(title, "", len(chosen), "".join(_single(record) for record in chosen[:_SHOWN_SAMPLES]))


def _samples_section(title: str, lead: str, count: int, body: str) -> str:
    shown = f" Shown: the {_SHOWN_SAMPLES} that changed most." if lead and count > _SHOWN_SAMPLES else ""
    return f'<h2>{title}</h2><p class="soft">{lead}{shown}</p>{body}'


def _pair(pair: Pair) -> str:
    tone = "good" if pair.change > 0 else "bad" if pair.change < 0 else ""
    return f'<div class="pair">{_prompt(pair.before)}{_answer(pair.before)}{_answer(pair.after, tone)}</div>'


def _single(record: Mapping[str, Any]) -> str:
    return f'<div class="pair">{_prompt(record)}{_answer(record)}</div>'


def _prompt(record: Mapping[str, Any]) -> str:
    return (
        f'<div class="prompt"><span class="soft">Prompt, row {html_text(record["row"])}</span>'
        f'<pre dir="auto">{html_text(record["prompt"])}</pre></div>'
    )


def _answer(record: Mapping[str, Any], tone: str = "") -> str:
    reward = record["reward"]
    shown = number(reward) if isinstance(reward, int | float) else html_text(reward)
    return (
        f'<div><span class="soft">Step {html_text(record["step"])}, reward <b class="{tone}">{shown}</b></span>'
        f'<pre dir="auto">{html_text(record["response"])}</pre></div>'
    )


def configuration(run: RunData) -> str:
    """The resolved run file, folded."""
    if not run.config_text:
        return ""
    return (
        '<h2>Configuration</h2><div class="card"><details><summary>config.toml</summary>'
        f"<pre>{html_text(run.config_text)}</pre></details></div>"
    )
