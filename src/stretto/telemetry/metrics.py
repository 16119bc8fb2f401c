"""The vocabulary of metrics, and the helpers that produce them.

`python -m stretto.telemetry.metrics > docs/metrics.md` writes the page that lists them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Metric(NamedTuple):
    """What one metric is called and means; ``sentence`` says how it is counted."""

    title: str
    sentence: str


PART_PREFIX = "reward/part/"
_INTRODUCTION = """Written by `python -m stretto.telemetry.metrics`: edit the table in that module, not this page.

Every step adds a line to `metrics.jsonl` in the run directory: `step`, and those of these names that were measured in
it. Step 0 is the evaluation before training. What was not measured is left out, never written as 0. Beside these there
is `reward/part/<reward>`, the mean of each reward function before its weight, and `reward/failed/<kind>`, the share of
samples that failed in that way."""

METRICS: dict[str, Metric] = {
    "reward/mean": Metric("Reward", "Mean reward of the samples of the step."),
    "reward/std": Metric("Reward spread", "Standard deviation of those rewards (divided by n)."),
    "reward/zero_variance_share": Metric(
        "Groups without signal", "Share of groups whose samples all have the same reward, hence zero advantage."
    ),
    "reward/failed_share": Metric(
        "Failed rewards", "Share of samples dropped because a reward crashed, timed out or returned no usable number."
    ),
    "rollout/response_length_mean": Metric("Response length", "Mean response length, in tokens."),
    "rollout/response_length_max": Metric("Longest response", "Longest response of the step, in tokens."),
    "rollout/truncated_share": Metric("Truncated", "Share of responses cut off at the token limit."),
    "rollout/tokens_per_s": Metric("Rollout speed", "Response tokens generated per second of the rollout phase."),
    "train/loss": Metric("Loss", "The loss that was differentiated, averaged over the step's optimizer steps."),
    "train/grad_norm": Metric("Gradient norm", "Global gradient norm before clipping."),
    "train/clip_fraction": Metric("Clip fraction", "Share of loss tokens whose PPO ratio was clipped."),
    "train/entropy": Metric("Entropy", "Mean entropy of the policy over loss tokens, in nats."),
    "train/kl_reference": Metric("KL to reference", "Estimated KL divergence to the reference model, nats per token."),
    "train/ratio_mean": Metric("Ratio", "Mean PPO ratio, current over old; 1 at the first optimizer step."),
    "train/ratio_max_deviation": Metric("Ratio deviation", "Largest distance of a PPO ratio from 1."),
    "train/lr": Metric("Learning rate", "Learning rate of the step's last optimizer step."),
    "train/skipped_steps": Metric(
        "Skipped steps", "Optimizer steps skipped in this step because a loss or gradient was not finite."
    ),
    "train/active_share": Metric("Active samples", "Share of samples that needed a backward pass."),
    "train/tokens_per_s": Metric("Training speed", "Tokens trained on per second of the training phase."),
    "mismatch/kl": Metric("Engine mismatch", "Estimated KL between the engine's and the trainer's log-probs, nats."),
    "mismatch/logprob_diff_mean": Metric(
        "Mean log-prob difference", "Mean |engine - trainer| log-prob of a sampled token."
    ),
    "mismatch/logprob_diff_max": Metric(
        "Largest log-prob difference", "Largest |engine - trainer| log-prob of a sampled token."
    ),
    "mismatch/weight_mean": Metric("Mismatch weight", "Mean importance weight exp(old - behaviour) after its cap."),
    "mismatch/capped_fraction": Metric("Capped weights", "Share of loss tokens whose mismatch weight hit the cap."),
    "eval/score": Metric("Held-out score", "Mean reward on the held-out prompts."),
    "eval/failed_share": Metric(
        "Held-out failed", "Share of held-out samples that could not be scored and do not count."
    ),
    "eval/truncated_share": Metric("Held-out truncated", "Share of held-out responses cut off at the token limit."),
    "eval/response_length_mean": Metric("Held-out length", "Mean held-out response length, in tokens."),
    "sync/seconds": Metric("Weight sync", "Seconds from prepare to commit of the step's publication."),
    "sync/bytes": Metric(
        "Bytes synced",
        "Bytes written into the engines of all ranks, 0 when they share the weights; through files: the bytes of these "
        "files, once for each receiver.",
    ),
    "sync/full_bytes": Metric(
        "Bytes of all weights", "Through files: what sync/bytes would be if nothing were left out as unchanged."
    ),
    "sync/version": Metric("Weight version", "Number of the publication that the engine serves."),
    "tokens/generated": Metric("Generated", "Response tokens generated since the run began."),
    "tokens/trained": Metric("Trained", "Response tokens of samples that were trained on, since the run began."),
    "tokens/dropped": Metric("Dropped", "Response tokens of samples dropped for a reason, since the run began."),
    "tokens/in_flight": Metric("In flight", "Response tokens generated and neither trained nor dropped yet."),
    "tokens/per_s": Metric("Throughput", "Response tokens of the step per second of the whole step."),
    "time/rollout": Metric("Rollout", "Seconds spent generating."),
    "time/reward": Metric("Reward", "Seconds spent waiting for rewards."),
    "time/train": Metric("Train", "Seconds spent in log-probs, forward, backward and optimizer."),
    "sync/verify_logprob_diff_mean": Metric(
        "Verified difference", "Mean |engine - trainer| log-prob of a fixed prompt's response, after a publication."
    ),
    "sync/verify_logprob_diff_max": Metric("Largest verified difference", "The largest of those differences."),
    "time/switch": Metric("Switch", "Seconds that a device's memory took to change hands between trainer and server."),
    "time/sync": Metric("Sync", "Seconds spent publishing weights."),
    "time/sync_blocked": Metric(
        "Blocked by sync",
        "Fully async: seconds that the trainer waited for the publication before, and for its snapshot.",
    ),
    "time/verify": Metric("Verify", "Seconds spent on comparing the engine's weights with the trainer's."),
    "time/eval": Metric("Evaluation", "Seconds spent evaluating."),
    "time/checkpoint": Metric("Checkpoint", "Seconds spent saving."),
    "time/step": Metric(
        "Step", "Seconds since the previous step was logged; saving a checkpoint counts in the next one."
    ),
    "async/lag_mean": Metric(
        "Lag", "Versions between the weights that were trained and those of a sample's oldest token, mean over samples."
    ),
    "async/lag_max": Metric("Largest lag", "The largest of these."),
    "async/lag_histogram": Metric("Lags", "Samples of the step by their lag: 0, 1, ... mode.max_staleness."),
    "async/versions_mean": Metric(
        "Versions a sample", "Versions of the weights that a sample's tokens come from, mean."
    ),
    "async/trainer_idle_share": Metric("Trainer idle", "Share of the step that the trainer waited for a batch."),
    "async/restarts": Metric("Trainer restarts", "Times that the trainer began anew from a checkpoint."),
    "async/replaced": Metric(
        "Replaced parts", "Engines and reward workers that were gone and replaced since the run was started."
    ),
    "memory/peak_bytes": Metric(
        "Peak memory", "The most memory that a process had (CPU) or allocated on its device (CUDA), in bytes."
    ),
    "memory/forecast_bytes": Metric("Forecast memory", "What that peak was forecast to be at the most, in bytes."),
}


def describe(name: str) -> Metric:
    """The title and meaning of a metric; a name outside the table (a custom one) is its own title."""
    if name.startswith(PART_PREFIX):
        part = name.removeprefix(PART_PREFIX)
        return Metric(f"Reward part: {part}", f"Mean of the reward {part}, before its weight.")
    return METRICS.get(name, Metric(name, ""))


def metrics_markdown() -> str:
    """The table as a Markdown page, one section for each group of names."""
    lines = ["# Metrics", "", _INTRODUCTION]
    group = ""
    for name, metric in METRICS.items():
        if not name.startswith(f"{group}/"):
            group = name.partition("/")[0]
            lines += ["", f"## {group}", "", "| name | title | |", "|---|---|---|"]
        sentence = metric.sentence.replace("|", "\\|")
        lines.append(f"| `{name}` | {metric.title} | {sentence} |")
    return "\n".join(lines)


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (divided by n, so 0 for one value). Raises ValueError when there are no values."""
    if not values:
        raise ValueError("no values to average; leave the metric out of this step instead")
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


class PhaseTimer:
    """Adds up wall seconds by phase: ``with timer("rollout"): ...``. Phases may repeat within a step but not nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: str | None = None
        self._reset_at = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the seconds of the block as ``time/<phase>``, also when it raises."""
        assert self._running is None, f"phase {phase} inside {self._running}: its seconds would count twice"
        self._running, started = phase, time.perf_counter()
        try:
            yield
        finally:
            self._running = None
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """``time/<phase>`` and ``time/step`` (everything since the last call, or construction), then start anew."""
        now = time.perf_counter()
        result = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        result["time/step"] = now - self._reset_at
        self._seconds, self._reset_at = {}, now
        return result


if __name__ == "__main__":
    print(metrics_markdown())
