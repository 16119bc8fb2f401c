"""Ways of carrying weights, one file each."""

from stretto.sync.transports.alias import AliasTransport
from stretto.sync.transports.local import LocalTransport

__all__ = ["AliasTransport", "LocalTransport"]
