"""Ways of carrying weights, one file each."""

from stretto.sync.transports.alias import AliasTransport
from stretto.sync.transports.planned import PlannedTransport

__all__ = ["AliasTransport", "PlannedTransport"]
