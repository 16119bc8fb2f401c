"""Processes that stand where an engine's ranks are: a module with parameters, which calls our receiver when told to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from stretto.sync import windows


class Bare(nn.Module):
    """Holds tensors under any dotted name."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.tensors = dict(tensors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.tensors.items())


class EngineRanks:
    """Processes that meet `stretto.sync.receivers.Enterable`. Each holds the tensors that it is given.

    With `moves`, their loader puts what arrives in the place of a parameter, in other memory.
    """

    def __init__(
        self,
        tensors: list[dict[str, Tensor]],
        *,
        derived: tuple[str, ...] = (),
        window: int | None = None,
        moves: bool = False,
    ):
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank, held in enumerate(tensors):
            here, there = context.Pipe()
            numbers = {
                name: one.numpy() if one.dtype != torch.bfloat16 else one.float().numpy() for name, one in held.items()
            }
            dtypes = {name: str(one.dtype).removeprefix("torch.") for name, one in held.items()}
            arguments = (there, rank, numbers, dtypes, derived, window, moves)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def enter(self, payload: str, timeout_s: float) -> None:
        for pipe in self.pipes:
            pipe.send(("enter", payload))
        errors = [self._error(rank, timeout_s) for rank in range(len(self.pipes))]
        if any(errors):
            raise RuntimeError("; ".join(error for error in errors if error))

    def _error(self, rank: int, timeout_s: float) -> str | None:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} did not come back"
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return f"rank {rank} of the engine died"

    def tensors(self, rank: int) -> dict[str, Tensor]:
        self.pipes[rank].send(("tensors", None))
        return {name: torch.from_numpy(one) for name, one in self.pipes[rank].recv().items()}

    def addresses(self, rank: int) -> dict[str, int]:
        self.pipes[rank].send(("addresses", None))
        return self.pipes[rank].recv()

    def change(self, rank: int, name: str) -> None:
        """Something else than a publication writes into a tensor."""
        self.pipes[rank].send(("change", name))
        self.pipes[rank].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _rank(
    pipe: Connection,
    rank: int,
    numbers: dict[str, Any],
    dtypes: dict[str, str],
    derived: tuple[str, ...],
    window: int | None,
    moves: bool,
) -> None:
    from stretto.engines.inside.base import Inside
    from stretto.engines.inside.receiver import enter

    torch.set_num_threads(1)
    if window is not None:
        windows.WINDOW_BYTES = window
    held = {name: torch.from_numpy(one.copy()).to(getattr(torch, dtypes[name])) for name, one in numbers.items()}

    def load(named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if moves:
                bare.tensors[name] = tensor
            held[name].copy_(tensor)

    bare = Bare(held)
    inside = Inside(bare, rank, torch.device("cpu"), lambda: list(derived), load)
    while True:
        command, argument = pipe.recv()
        if command == "enter":
            error = None
            try:
                enter(argument, inside)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            pipe.send(error)
        elif command == "change":
            held[argument].view(-1)[0] += 1
            pipe.send(None)
        elif command == "tensors":
            pipe.send({name: one.float().numpy() for name, one in held.items()})
        else:
            pipe.send({name: one.data_ptr() for name, one in held.items()})
