"""Ways of carrying weights, one file each."""

from stretto.sync.transports.alias import AliasTransport
from stretto.sync.transports.disk import DiskTransport
from stretto.sync.transports.engine import EngineTransport
from stretto.sync.transports.http import HttpTransport
from stretto.sync.transports.planned import PlannedTransport
from stretto.sync.transports.stream import StreamTransport

__all__ = ["AliasTransport", "DiskTransport", "EngineTransport", "HttpTransport", "PlannedTransport", "StreamTransport"]
