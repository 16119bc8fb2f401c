"""From scored samples to a batch: what cannot be trained on is dropped with its reason, the rest gets advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stretto.algorithms.advantages import group_advantages
from stretto.config.run import RunConfig
from stretto.errors import RunError
from stretto.orchestration.queue import SampleQueue
from stretto.orchestration.rollouts import Scored, failure_told, why_dropped
from stretto.types import Batch, Rollout
from stretto.world import World


def enqueue(queue: SampleQueue[Rollout], scored: Sequence[Scored]) -> None:
    """Reserve, then offer or drop, every sample."""
    for group_id, samples in Counter(one.rollout.group_id for one in scored).items():
        queue.reserve(group_id, samples)
    for one in scored:
        reason = why_dropped(one.rollout.finish_reason, one.score)
        if reason is None:
            queue.offer(one.rollout.group_id, one.index, one.rollout)
        else:
            queue.drop(one.rollout.group_id, one.index, len(one.rollout.response_ids), reason)


def take_batch(queue: SampleQueue[Rollout], config: RunConfig) -> tuple[Batch, int]:
    """The complete groups as a batch, and how many of them have no variance in their rewards.

    A dropped sample has shrunk its group; a group of fewer than two samples is dropped.
    """
    rollouts: list[Rollout] = []
    for group_id, group in queue.take().items():
        if len(group) < 2:
            queue.end_dropped(group_id, "group_too_small")
        else:
            rollouts += group
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    assert len(rewards) == len(rollouts), "only scored samples are offered"
    advantages, constant = group_advantages(config.algorithm.advantage, rewards, [r.group_id for r in rollouts])
    return Batch(rollouts, advantages), constant


def check_failures(scored: Sequence[Scored], config: RunConfig, world: World) -> list[str]:
    """All ranks' failures in words. RunError when their share is beyond reward.max_failed_share."""
    mine = [
        failure_told(one.rollout.source_row, one.index, failure)
        for one in scored
        if (failure := one.score.failure) is not None
    ]
    failed = [text for texts in world.gather(mine) for text in texts]
    check_failed_share(failed, int(world.sum([len(scored)])[0]), config)
    return failed


def check_failed_share(failed: Sequence[str], total: int, config: RunConfig) -> None:
    """RunError when so many of `total` samples, in words, are beyond reward.max_failed_share."""
    if len(failed) > config.reward.max_failed_share * total:
        raise RunError(
            f"{len(failed)} of {total} samples could not be scored, more than reward.max_failed_share = "
            f"{config.reward.max_failed_share:g} allows. The first: {failed[0]}"
        )
