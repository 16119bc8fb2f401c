"""How buckets get from one process of a plan to another, one file each."""

from stretto.sync.links.base import Link, Work
from stretto.sync.links.group import GroupLink
from stretto.sync.links.joined import JoinedLink
from stretto.sync.links.shared import SharedReceiver, SharedSender

__all__ = ["GroupLink", "JoinedLink", "Link", "SharedReceiver", "SharedSender", "Work"]
