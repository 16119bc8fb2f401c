"""The receiving end of publications, in one rank of an engine.

The engine calls `enter` in each of its ranks and waits; inside, the trainer says over a connection what to do, until it
lets the engine go on. The engine computes nothing in between, so nothing here races with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from torch import Tensor

from stretto.engines.inside.base import Inside, told
from stretto.engines.inside.reading import read
from stretto.sync.binding import tensor_differences
from stretto.sync.layout import Layout
from stretto.sync.links import JoinedLink, Link, SharedReceiver
from stretto.sync.plan import Plan
from stretto.sync.receivers import Terms
from stretto.sync.receiving import Direct, Loading, Receiving
from stretto.sync.reread import differing, given_up
from stretto.sync.windows import Part, parts_of

_OPEN: dict[str, Receiver] = {}


def enter(payload: str, inside: Inside) -> None:
    """Serve the trainer that `payload` (JSON) names until it lets go, or read the parcel that it names.

    Raises ConnectionError when the trainer is gone, RuntimeError when it is silent for longer than it said.
    """
    call = json.loads(payload)
    if "parcel" in call:
        read(call, inside)
        return
    receiver = _OPEN.get(call["id"])
    if receiver is None:
        for other in list(_OPEN.values()):  # of a trainer that is gone
            other.close()
        receiver = _OPEN[call["id"]] = Receiver(call, inside)
    try:
        receiver.serve()
    except BaseException:
        receiver.close()
        raise


class Receiver:
    """One trainer's connection to this rank, kept from publication to publication."""

    def __init__(self, call: Mapping[str, Any], inside: Inside):
        self._id, self._timeout_s = call["id"], float(call["timeout_s"])
        self._inside = inside
        self._key = bytes.fromhex(call["key"])
        self._senders: Mapping[int, str] = {int(number): address for number, address in call["senders"].items()}
        self._rank = int(call["first_rank"]) + inside.rank
        self._control = self._dial(call["control"])
        self._control.send(self._rank)
        self._link: Link | None = None
        self._receiving: Receiving | None = None
        self._addresses: dict[str, int] = {}

    def serve(self) -> None:
        """Do what the trainer says until it says "go on"."""
        while True:
            if not self._control.poll(self._timeout_s):
                raise RuntimeError(f"the trainer was not heard of for {self._timeout_s:g} s")
            try:
                command, argument = self._control.recv()
            except (EOFError, OSError) as error:
                raise ConnectionError("the trainer is gone") from error
            if command == "go on":
                self._control.send((True, None))
                return
            try:
                answer = (True, getattr(self, f"_{command}")(argument))
            except Exception as error:
                answer = (False, told(error))
            self._control.send(answer)

    def close(self) -> None:
        """Let go of the trainer and of its memory."""
        _OPEN.pop(self._id, None)
        self._control.close()
        if self._link is not None:
            self._link.close()

    def _inspect(self, layout: Layout) -> tuple[list[str], list[str]]:
        """What differs between the weights of this rank and a layout of what it should hold, and why beside that they
        cannot be written directly.
        """
        expected = layout.local(self._rank)
        held = {name: tensor for name, tensor in self._held().items() if name in expected}
        packed = [name for name, tensor in held.items() if given_up(tensor, expected[name][0])]
        shapes = {name: torch.empty(expected[name][0], dtype=held[name].dtype, device="meta") for name in packed}
        emptied = [f"{name} was given up for a packed copy" for name in packed]
        return tensor_differences(layout, self._rank, {**held, **shapes}), [*emptied, *self._inside.derived()]

    def _connect(self, argument: tuple[Plan, int, Terms]) -> None:
        """Take the plan, in which this is process `number`, and meet the senders."""
        plan, number, terms = argument
        link = self._link = self._join(plan, number, terms)
        inside, parts = self._inside, parts_of(plan, windowed=terms.windows)
        if terms.write == "direct":
            self._receiving = Direct(parts, number, self._rank, link, self._held, checksums=terms.checksums)
        else:
            self._addresses = self._places()
            self._receiving = Loading(
                parts, number, self._rank, link, inside.load, inside.device, checksums=terms.checksums
            )

    def _join(self, plan: Plan, number: int, terms: Terms) -> Link:
        device, timeout_s = self._inside.device, self._timeout_s
        if terms.store is not None:
            count = plan.process_count
            return JoinedLink(device, number, count, terms.store, terms.extra_bytes, timeout_s=timeout_s)
        connections = {sender: self._dial(address) for sender, address in self._senders.items()}
        for connection in connections.values():
            connection.send(number)
        return SharedReceiver(device, connections, timeout_s=timeout_s)

    def _receive(self, _: None) -> tuple[int, bool, str | None]:
        """One publication: bytes written, whether anything may have been written, and what went wrong."""
        assert self._receiving is not None, "connect comes first"
        try:
            written = self._receiving.run()
            self._check_addresses()
            return written, True, None
        except Exception as error:
            return 0, self._receiving.touched, told(error)

    def _reread(self, argument: tuple[Part, int]) -> list[str]:
        """The tensors, among those of a part of the plan for direct writes, that are not what is sent now."""
        part, number = argument
        assert self._link is not None, "connect comes first"
        return differing(part, number, self._rank, self._held(), link=self._link, source={})

    def _check_addresses(self) -> None:
        """Raise when a parameter is not where it was: what the engine has captured would compute with the old one."""
        now = self._places() if self._addresses else {}
        if moved := [name for name, address in self._addresses.items() if now.get(name) != address]:
            raise RuntimeError(f"the engine's loader moved parameters to other addresses: {', '.join(moved[:5])}")

    def _places(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._inside.model.named_parameters()}

    def _held(self) -> dict[str, Tensor]:
        model = self._inside.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def _dial(self, address: str) -> Connection:
        return Client(address, authkey=self._key)
