"""Draws: reproducible uniforms, an exact inverse CDF, and filters that leave what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import filtered_by_transformers

from stretto.engines.embedded.sampling import Draws, draw, inverse_cdf, uniforms

MASK = 2**64 - 1
LAST_UNIFORM = 1 - 2.0**-53


def splitmix(seed: int, position: int) -> float:
    """The same generator in Python's whole numbers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    return (mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15 & MASK) >> 11) / 2**53


def one_draw(seed: int, position: int) -> float:
    return float(uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0])


def test_uniforms_are_pinned() -> None:
    """Seed 0 is the published SplitMix64 sequence from state 0: its first output is 0xE220A8397B1DCDAF."""
    assert one_draw(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert one_draw(0, 1) == (0x6E789E6AA1B965F4 >> 11) / 2**53
    assert one_draw(1, 0) == 0.7497482413580301
    assert one_draw(2**64 - 1, 5) == 0.05588332997080059


@pytest.mark.parametrize("seed", [0, 1, 17, 2**40, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095])
def test_uniforms_are_splitmix_of_seed_and_position(seed: int, position: int) -> None:
    assert one_draw(seed, position) == splitmix(seed, position)


def test_uniforms_do_not_repeat_over_neighbouring_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == 300 * 300
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert chi_square(counts, np.full(100, 900.0)) < chi_square_limit(99)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_limit(freedom: int) -> float:
    """The 0.999 quantile (Wilson and Hilferty, PNAS 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def masses(width: int, seed: int, zeros: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(width, generator=generator) + 0.5
    mass[torch.rand(width, generator=generator) < zeros] = 0
    return mass


@pytest.mark.parametrize("width", [300, 128, 97])
def test_draws_follow_the_distribution(width: int) -> None:
    mass_V = masses(width, seed=width, zeros=0.3)
    count = 20_000
    uniform_N = torch.from_numpy(uniforms(np.arange(count, dtype=np.uint64), np.full(count, 3)))
    counts = torch.bincount(inverse_cdf(mass_V.expand(count, -1), uniform_N), minlength=width).numpy()
    live = mass_V.numpy() > 0
    assert counts[~live].sum() == 0
    expected = (mass_V.double() / mass_V.double().sum() * count).numpy()
    assert chi_square(counts[live], expected[live]) < chi_square_limit(int(live.sum()) - 1)


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 300, 49_152, 50_257])
def test_the_drawn_index_is_where_the_cumulative_mass_passes_the_uniform(width: int) -> None:
    mass_V = masses(width, seed=width, zeros=0.2 if width > 2 else 0.0)
    uniform_N = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got_N = inverse_cdf(mass_V.expand(64, -1), uniform_N)
    cumulative_V = mass_V.double().cumsum(-1)
    share_V = cumulative_V / cumulative_V[-1]
    below_N = torch.where(got_N > 0, share_V[(got_N - 1).clamp(min=0)], torch.zeros(64, dtype=torch.float64))
    assert (below_N <= uniform_N + 1e-6).all()
    assert (share_V[got_N] >= uniform_N - 1e-6).all()
    assert (mass_V[got_N] > 0).all()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LAST_UNIFORM])
@pytest.mark.parametrize("width", [5, 128, 256, 300])
@pytest.mark.parametrize("live", [[0], [-1], [2], [1, -2], [0, -1]])
def test_extremes_never_choose_an_index_without_mass(uniform: float, width: int, live: list[int]) -> None:
    mass_V = torch.zeros(width)
    mass_V[live] = torch.tensor([1e-30, 1.0])[-len(live) :]
    index = int(inverse_cdf(mass_V[None], torch.tensor([uniform], dtype=torch.float64))[0])
    assert index in [i % width for i in live]


def test_the_extremes_are_the_first_and_the_last_index_with_mass() -> None:
    mass_V = torch.zeros(300)
    mass_V[3:290] = 1.0
    both = inverse_cdf(mass_V.expand(2, -1), torch.tensor([0.0, LAST_UNIFORM], dtype=torch.float64))
    assert both.tolist() == [3, 289]


def draws(count: int, temperature: float = 1.0, **filters: float) -> Draws:
    uniform_N = torch.from_numpy(uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)))
    return Draws(
        temperature_N=torch.full((count,), temperature or 1.0),
        greedy_N=torch.full((count,), temperature == 0),
        uniform_N=uniform_N,
        top_p_N=torch.full((count,), filters.get("top_p", 1.0), dtype=torch.float64),
        top_k_N=torch.full((count,), int(filters.get("top_k", 0))),
        min_p_N=torch.full((count,), filters.get("min_p", 0.0)),
    )


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.9}], ids=str
)
def test_filtered_draws_follow_the_renormalised_distribution(filters: dict[str, float]) -> None:
    count = 10_000
    logits_V = torch.randn(61, generator=torch.Generator().manual_seed(4)) * 1.5
    ids_N, logprobs_N = draw(logits_V.expand(count, -1), draws(count, temperature=0.9, **filters))
    kept_V = filtered_by_transformers((logits_V / 0.9)[None], filters)
    expected = (kept_V[0].softmax(-1) * count).numpy()
    counts = torch.bincount(ids_N, minlength=61).numpy()
    live = expected > 0
    assert 1 < live.sum() < 61
    assert counts[~live].sum() == 0
    assert (counts[live] > 0).all()
    assert chi_square(counts[live], expected[live]) < chi_square_limit(int(live.sum()) - 1)
    torch.testing.assert_close(logprobs_N, (logits_V / 0.9).log_softmax(-1)[ids_N], atol=1e-6, rtol=0)


def test_filters_switched_off_change_no_draw() -> None:
    logits_NV = torch.randn(500, 131, generator=torch.Generator().manual_seed(5)) * 4
    off = draws(500)
    plain = Draws(off.temperature_N, off.greedy_N, off.uniform_N)
    torch.testing.assert_close(draw(logits_NV, off), draw(logits_NV, plain), atol=0, rtol=0)


def test_a_tight_filter_is_greedy() -> None:
    logits_NV = torch.randn(50, 131, generator=torch.Generator().manual_seed(6))
    for filters in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert draw(logits_NV, draws(50, **filters))[0].equal(logits_NV.argmax(-1))
    assert draw(logits_NV, draws(50, temperature=0.0))[0].equal(logits_NV.argmax(-1))


def test_rows_with_their_own_settings_do_not_mix() -> None:
    logits_NV = torch.randn(3, 131, generator=torch.Generator().manual_seed(7))
    mixed = Draws(
        temperature_N=torch.tensor([1.0, 0.5, 2.0]),
        greedy_N=torch.tensor([True, False, False]),
        uniform_N=torch.tensor([0.9, 0.2, 0.7], dtype=torch.float64),
        top_p_N=torch.tensor([1.0, 0.4, 1.0], dtype=torch.float64),
        top_k_N=torch.tensor([0, 0, 3]),
        min_p_N=torch.tensor([0.0, 0.0, 0.1]),
    )
    ids_N, logprobs_N = draw(logits_NV, mixed)
    for row in range(3):
        alone = Draws(**{name: getattr(mixed, name)[row : row + 1] for name in mixed.__dataclass_fields__})
        id_1, logprob_1 = draw(logits_NV[row : row + 1], alone)
        assert (id_1.item(), logprob_1.item()) == (ids_N[row].item(), logprobs_N[row].item())
