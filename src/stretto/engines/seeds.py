"""Randomness that depends on a sample's seed and a position in it, and on nothing else."""

from __future__ import annotations

import numpy as np


def mixed(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """64 random bits (uint64) per row, a pure function of (seed, position): the SplitMix64 generator.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), figure 17.
    """
    with np.errstate(over="ignore"):
        step = (positions_N.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        return _mix(_mix(seeds_N.astype(np.uint64)) + step)


def part_seed(seed: int, position: int) -> int:
    """The seed of a part of a sample, from how many of its tokens came before.

    A part that began with the sample's own seed again would repeat the randomness of the part before. 63 bits because
    the servers hold seeds as signed.
    """
    return int(mixed(np.array([seed], np.uint64), np.array([position]))[0]) >> 1


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
