"""The seed of a part of a sample."""

from __future__ import annotations

_MASK = 2**64 - 1


def part_seed(seed: int, position: int) -> int:
    """63 bits that depend on the sample's seed and on how many of its tokens came before, and on nothing else.

    A part that began with the sample's own seed again would repeat the randomness of the part before. SplitMix64
    (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17), as in the embedded
    engine; 63 bits because the servers hold seeds as signed.
    """
    return _mix((_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
