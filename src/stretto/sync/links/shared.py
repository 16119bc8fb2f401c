"""Buckets in memory that both processes see: CUDA memory by IPC handles, a file without a name on CPU.

The sender packs a slot and says so over a connection; the receiver unpacks from that very memory and says that it is
free again. Nothing else is copied, and nothing is left behind however either side ends: the file has no name, and CUDA
frees what it exported with the process.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from stretto.sync.links.base import Way, Work

_SLOTS = 2
_ALIGN = 16
"""Bytes: what pieces and checksums in a slot are aligned to, the second slot's too."""


class SharedSender:
    """The sending end, with a connection to each receiver; makes the slots and gives them to the receivers.

    The slots together take at most `extra_bytes`.
    Everyone waits at most `timeout_s` for the other. Raises RuntimeError naming the receiver that is gone or silent.
    """

    straight = False

    def __init__(
        self, device: torch.device, receivers: Mapping[int, Connection], extra_bytes: int, *, timeout_s: float
    ):
        self.bucket_bytes = extra_bytes // _SLOTS // _ALIGN * _ALIGN
        self._device, self._receivers, self._timeout_s = device, receivers, timeout_s
        self._unpacked_by: dict[int, int] = {}
        if device.type == "cuda":
            self._slots = self._offer_cuda()
        else:
            self._slots = self._offer_file()
        for peer in receivers:
            self._hear(peer, "open")

    def _offer_cuda(self) -> list[Tensor]:
        from torch.multiprocessing.reductions import reduce_tensor

        flat = torch.empty(_SLOTS * self.bucket_bytes, dtype=torch.uint8, device=self._device)
        _, arguments = reduce_tensor(flat)
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        for peer, connection in self._receivers.items():
            _send(connection, (self.bucket_bytes, uuid, bytes(ForkingPickler.dumps(arguments))), peer)
        return list(flat.split(self.bucket_bytes))

    def _offer_file(self) -> list[Tensor]:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(_SLOTS * self.bucket_bytes)
            for peer, connection in self._receivers.items():
                _send(connection, (self.bucket_bytes, None, None), peer)
                send_handle(connection, file.fileno(), None)
            return _mapped(file.fileno(), self.bucket_bytes)

    def buffer(self, way: Way, slot: int, peer: int, need: int) -> Tensor:
        """See :class:`~stretto.sync.links.base.Link`."""
        assert way == "out"
        assert need <= self.bucket_bytes
        self._wait_for(slot)
        return self._slots[slot]

    def start(
        self, slot: int, out: tuple[int, Sequence[Tensor]] | None, into: tuple[int, Sequence[Tensor]] | None
    ) -> list[Work]:
        """See :class:`~stretto.sync.links.base.Link`."""
        assert into is None, "only the trainer sends"
        if out is not None:
            _finish_kernels(self._device)
            _send(self._receivers[out[0]], ("full", slot), out[0])
            self._unpacked_by[slot] = out[0]
        return []

    def release(self, slot: int, peer: int) -> None:
        """Nothing arrives here."""

    def settle(self) -> None:
        """See :class:`~stretto.sync.links.base.Link`."""
        for slot in list(self._unpacked_by):  # in the order in which they were sent, which is that of the answers
            self._wait_for(slot)

    def close(self) -> None:
        """Give the slots back, which the receivers may still hold."""
        self._slots = []
        for connection in self._receivers.values():
            connection.close()

    def _wait_for(self, slot: int) -> None:
        peer = self._unpacked_by.pop(slot, None)
        if peer is not None:
            self._hear(peer, ("free", slot))

    def _hear(self, peer: int, expected: Any) -> None:
        said = _receive(self._receivers[peer], f"process {peer}", self._timeout_s)
        if said != expected:
            raise RuntimeError(f"process {peer} said {said!r} in place of {expected!r}")


class SharedReceiver:
    """The receiving end, with a connection to each sender."""

    straight = False

    def __init__(self, device: torch.device, senders: Mapping[int, Connection], *, timeout_s: float):
        self._device, self._senders, self._timeout_s = device, senders, timeout_s
        self._slots: dict[int, list[Tensor]] = {}
        self.bucket_bytes = 0
        for peer, connection in senders.items():
            self._slots[peer] = _open_slots(connection, _receive(connection, f"process {peer}", timeout_s))
            self.bucket_bytes = len(self._slots[peer][0])
            connection.send("open")

    def buffer(self, way: Way, slot: int, peer: int, need: int) -> Tensor:
        """See :class:`~stretto.sync.links.base.Link`."""
        assert way == "in"
        assert need <= self.bucket_bytes
        return self._slots[peer][slot]

    def start(
        self, slot: int, out: tuple[int, Sequence[Tensor]] | None, into: tuple[int, Sequence[Tensor]] | None
    ) -> list[Work]:
        """See :class:`~stretto.sync.links.base.Link`."""
        assert out is None, "engines send no weights"
        return [] if into is None else [_Arrival(self._senders[into[0]], into[0], slot, self._timeout_s)]

    def release(self, slot: int, peer: int) -> None:
        """See :class:`~stretto.sync.links.base.Link`."""
        _finish_kernels(self._device)
        _send(self._senders[peer], ("free", slot), peer)

    def settle(self) -> None:
        """Nothing is sent from here."""

    def close(self) -> None:
        """Let go of the senders' memory."""
        self._slots.clear()
        for connection in self._senders.values():
            connection.close()


class _Arrival:
    """A bucket that is awaited."""

    def __init__(self, connection: Connection, peer: int, slot: int, timeout_s: float):
        self._connection, self._peer, self._slot, self._timeout_s = connection, peer, slot, timeout_s

    def wait(self) -> None:
        """See :class:`~stretto.sync.links.base.Work`."""
        said = _receive(self._connection, f"process {self._peer}", self._timeout_s)
        if said != ("full", self._slot):
            raise RuntimeError(f"process {self._peer} said {said!r} in place of a full slot {self._slot}")


def _open_slots(connection: Connection, offer: Any) -> list[Tensor]:
    """A sender's slots, seen from this process."""
    size, uuid, handle = offer
    if handle is None:
        descriptor = recv_handle(connection)
        try:
            return _mapped(descriptor, size)
        finally:
            os.close(descriptor)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(handle))
    arguments[6] = _device_index(uuid)  # in place of the number in the sender's process, which may see other devices
    return list(rebuild_cuda_tensor(*arguments).split(size))


def _mapped(descriptor: int, size: int) -> list[Tensor]:
    """The slots in an open file, mapped as long as a view of them is left."""
    memory = mmap.mmap(descriptor, _SLOTS * size)
    return list(torch.frombuffer(memory, dtype=torch.uint8).split(size))


def _device_index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise RuntimeError(f"the trainer's GPU {uuid} is not visible to the engine, which ipc needs")


def _finish_kernels(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _send(connection: Connection, message: Any, peer: int) -> None:
    try:
        connection.send(message)
    except OSError as error:
        raise RuntimeError(f"process {peer} is gone ({type(error).__name__})") from error


def _receive(connection: Connection, who: str, timeout_s: float) -> Any:
    begin = time.monotonic()
    try:
        if not connection.poll(timeout_s):
            raise RuntimeError(f"{who} was not heard of for {timeout_s:g} s")
        return connection.recv()
    except (EOFError, OSError) as error:
        waited = time.monotonic() - begin
        raise RuntimeError(f"{who} is gone ({type(error).__name__} after {waited:.1f} s)") from error
