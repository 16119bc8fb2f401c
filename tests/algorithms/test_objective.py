"""The whole loss against plain Python, its independence of the cut, and what it reports."""

import dataclasses
import math
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch

from stretto.algorithms.objective import Objective, TokenBatch, merge, to_metrics
from stretto.config.sections import AlgorithmConfig

FULL: dict[str, Any] = {"kl_coef": 0.05, "entropy_coef": 0.01, "dual_clip": 3.0, "clip_high": 0.3}
CONFIGS: list[dict[str, Any]] = [
    {},
    FULL,
    FULL | {"kl_estimator": "k1", "mismatch": "mask", "mismatch_cap": 1.1},
    FULL | {"kl_estimator": "k2", "mismatch": "off"},
    FULL | {"old_logprobs": "behaviour"},
]


def batch(size: int = 40, seed: int = 0, dtype: torch.dtype = torch.float64) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) * scale

    old = -noise(1.0).exp()
    return TokenBatch(
        current=(old + noise(0.3)).requires_grad_(),
        old=old,
        behaviour=old + noise(0.2),
        advantages=noise(1.0),
        weights=noise(1.0).abs() / max(size, 1),
        entropy=noise(1.0).abs().requires_grad_(),
        reference=old + noise(0.4),
    )


def take(tokens: TokenBatch, part: slice) -> TokenBatch:
    return TokenBatch(*(getattr(tokens, field.name)[part] for field in dataclasses.fields(tokens)))


def by_hand(config: AlgorithmConfig, tokens: TokenBatch) -> tuple[float, dict[str, float]]:
    """The loss and the metrics in plain Python, token by token."""
    columns = [getattr(tokens, field.name).tolist() for field in dataclasses.fields(tokens)]
    losses, rows = [], []
    for current, old, behaviour, advantage, weight, entropy, reference in zip(*columns, strict=True):
        ratio = math.exp(current - (behaviour if config.old_logprobs == "behaviour" else old))
        plain = ratio * advantage
        surrogate = min(plain, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
        if config.dual_clip is not None and advantage < 0:
            surrogate = max(surrogate, config.dual_clip * advantage)
        weighed = config.old_logprobs == "trainer" and config.mismatch != "off"
        gap = math.exp(old - behaviour)
        capped = weighed and gap > config.mismatch_cap
        beyond = config.mismatch_cap if config.mismatch == "truncate" else 0.0
        factor = (beyond if capped else gap) if weighed else 1.0
        log_r = reference - current
        kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[config.kl_estimator]
        losses.append(weight * (-surrogate * factor + config.kl_coef * kl - config.entropy_coef * entropy))
        rows.append(
            {
                "train/clip_fraction": float(surrogate != plain),
                "train/ratio_mean": ratio,
                "train/ratio_max_deviation": abs(ratio - 1),
                "train/kl_reference": kl,
                "train/entropy": entropy,
                "mismatch/kl": gap - 1 - (old - behaviour),
                "mismatch/logprob_diff_mean": abs(old - behaviour),
                "mismatch/logprob_diff_max": abs(old - behaviour),
                "mismatch/weight_mean": factor,
                "mismatch/capped_fraction": float(capped),
            }
        )
    metrics = {
        name: max(row[name] for row in rows) if "max" in name else math.fsum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
    return math.fsum(losses), metrics


@pytest.mark.parametrize("keys", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_metrics_are_those_computed_by_hand(keys, seed):
    config, tokens = AlgorithmConfig(**keys), batch(seed=seed)
    loss, stats = Objective(config)(tokens)
    expected_loss, expected_metrics = by_hand(config, tokens)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert to_metrics(stats) == pytest.approx(expected_metrics, rel=1e-10)


@pytest.mark.parametrize("keys", CONFIGS)
def test_gradients_are_those_of_finite_differences(keys):
    objective, tokens = Objective(AlgorithmConfig(**keys)), batch(size=12)

    def loss(current, entropy):
        return objective(dataclasses.replace(tokens, current=current, entropy=entropy))[0]

    assert tokens.entropy is not None
    assert torch.autograd.gradcheck(loss, (tokens.current, tokens.entropy))


@pytest.mark.parametrize("keys", CONFIGS)
@pytest.mark.parametrize("cuts", [(20,), (1, 2, 39), (0, 13, 13, 40)])
def test_parts_of_a_batch_add_up_to_the_whole(keys, cuts):
    objective, tokens = Objective(AlgorithmConfig(**keys)), batch()
    whole_loss, whole_stats = objective(tokens)
    edges = [0, *cuts, 40]
    parts = [objective(take(tokens, slice(a, b))) for a, b in pairwise(edges)]
    parts_loss = torch.stack([loss for loss, _ in parts]).sum()
    assert parts_loss.item() == pytest.approx(whole_loss.item(), abs=1e-12)
    (whole_gradient,) = torch.autograd.grad(whole_loss, tokens.current)
    (parts_gradient,) = torch.autograd.grad(parts_loss, tokens.current)
    torch.testing.assert_close(parts_gradient, whole_gradient, rtol=0, atol=1e-12)
    merged = to_metrics(reduce(merge, [stats for _, stats in parts]))
    assert merged == pytest.approx(to_metrics(whole_stats), abs=1e-12)


def test_merging_is_associative():
    objective = Objective(AlgorithmConfig(**FULL))
    a, b, c = (objective(batch(size, seed=size))[1] for size in (3, 17, 8))
    left, right = to_metrics(merge(merge(a, b), c)), to_metrics(merge(a, merge(b, c)))
    assert left == pytest.approx(right, rel=1e-14)
    assert left != pytest.approx(to_metrics(merge(a, b)), rel=1e-6)


@pytest.mark.parametrize("keys", CONFIGS)
def test_no_tokens_give_a_zero_loss_that_still_has_a_gradient(keys):
    objective, tokens = Objective(AlgorithmConfig(**keys)), batch()
    loss, stats = objective(take(tokens, slice(0, 0)))
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, tokens.current)
    assert gradient.tolist() == [0.0] * 40
    assert to_metrics(stats) == {}
    whole = objective(tokens)[1]
    assert to_metrics(merge(stats, whole)) == to_metrics(whole)


def test_the_first_step_reports_ratio_one_and_nothing_clipped():
    logprobs = torch.tensor([-0.3, -4.0, -11.0])
    ones = torch.ones(3)
    tokens = TokenBatch(logprobs.clone().requires_grad_(), logprobs, logprobs, ones, ones)
    _, stats = Objective(AlgorithmConfig())(tokens)
    assert to_metrics(stats) == {
        "train/clip_fraction": 0.0,
        "train/ratio_mean": 1.0,
        "train/ratio_max_deviation": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/logprob_diff_mean": 0.0,
        "mismatch/logprob_diff_max": 0.0,
        "mismatch/weight_mean": 1.0,
        "mismatch/capped_fraction": 0.0,
    }


def test_the_mismatch_kl_is_not_negative_in_float32():
    kl = to_metrics(Objective(AlgorithmConfig())(batch(size=2000, dtype=torch.float32))[1])["mismatch/kl"]
    assert 0 < kl < 0.1
    tokens = batch(size=1, dtype=torch.float32)
    nearly = dataclasses.replace(tokens, behaviour=torch.nextafter(tokens.old, torch.zeros(1)))
    assert 0 <= to_metrics(Objective(AlgorithmConfig())(nearly)[1])["mismatch/kl"] < 1e-12


def test_the_largest_deviation_counts_ratios_below_one():
    tokens = batch(size=2)
    shrunk = dataclasses.replace(tokens, current=tokens.old + torch.tensor([0.5, 0.25], dtype=torch.float64).log())
    metrics = to_metrics(Objective(AlgorithmConfig())(shrunk)[1])
    assert metrics["train/ratio_max_deviation"] == pytest.approx(0.75, rel=1e-12)


def test_stats_carry_no_gradient():
    _, stats = Objective(AlgorithmConfig(**FULL))(batch())
    values = [*stats.sums.values(), *stats.maxima.values()]
    assert all(v.shape == () and v.dtype == torch.float64 and not v.requires_grad for v in values)


@pytest.mark.parametrize(
    ("keys", "reference", "entropy", "dense"),
    [
        ({}, False, False, False),
        ({"kl_coef": 0.1}, True, False, True),
        ({"entropy_coef": 0.1}, False, True, True),
        (FULL, True, True, True),
    ],
)
def test_the_objective_says_what_it_needs(keys, reference, entropy, dense):
    objective = Objective(AlgorithmConfig(**keys))
    assert (objective.needs_reference, objective.needs_entropy, objective.dense) == (reference, entropy, dense)


@pytest.mark.parametrize("keys", CONFIGS)
def test_zero_advantage_adds_to_the_loss_only_when_the_objective_is_dense(keys):
    objective, tokens = Objective(AlgorithmConfig(**keys)), batch()
    idle = dataclasses.replace(tokens, advantages=torch.zeros(40, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(objective(idle)[0], tokens.current)
    assert gradient.any().item() == objective.dense


def test_a_ratio_that_divides_by_the_policy_itself_is_caught():
    tokens = batch()
    with pytest.raises(AssertionError, match="old is not detached"):
        dataclasses.replace(tokens, old=tokens.current)


def test_tensors_of_different_lengths_are_caught():
    with pytest.raises(AssertionError, match="weights is"):
        dataclasses.replace(batch(), weights=torch.ones(1, dtype=torch.float64))
