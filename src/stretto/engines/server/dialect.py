"""What differs between the servers: how they are started, and how each thing is said to them and by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from stretto.engines.base import Memory
from stretto.engines.server.client import Call
from stretto.types import FinishReason, Sampling


@dataclass(frozen=True)
class Setup:
    """What a server is started with. `receiver`: with our code inside; `filters`: whether filters will be asked for.

    `releases`: it will have to give memory back; `memory_share` of its devices' memory is its own, or as its options
    say when None.
    """

    directory: Path
    dtype: str
    max_length: int
    max_sequences: int
    tp: int
    device: torch.device
    filters: bool
    receiver: bool
    releases: bool = False
    memory_share: float | None = None


@dataclass(frozen=True)
class Part:
    """One request to the server: `prompt_ids` are the prompt and what was generated before; `position` counts that."""

    id: str
    prompt_ids: Sequence[int]
    position: int
    max_new_tokens: int
    seed: int
    sampling: Sampling
    stop_ids: Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What the server generated for a part. `why` is its own word on the finish reason, for messages."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    why: str


class Dialect(Protocol):
    """One kind of server. Pure: says which calls to make, and reads the answers (EngineError for what is malformed)."""

    name: str
    section: str
    """Of the run file, that holds its options."""
    list_options: str
    """A Python program that prints the server's own options, run by the server's interpreter."""

    def own_options(self, setup: Setup) -> Mapping[str, Any]:
        """The options that the adapter sets, by their Python names; None leaves an option out, and the user's too."""
        ...

    def command(self) -> Sequence[str]:
        """What follows the interpreter on the command line, before the options."""
        ...

    def environment(self, setup: Setup) -> Mapping[str, str]:
        """Variables of the server's environment."""
        ...

    def health(self) -> Call:
        """Answered with 200 once the server serves."""
        ...

    def introduction(self) -> Call:
        """What a server that runs already is asked about itself."""
        ...

    def meet(self, answer: Any, setup: Setup) -> None:
        """Take that server as it is. ValueError, with what to start it with, when it cannot serve this run."""
        ...

    def wrong_sampling(self, sampling: Sampling) -> str | None:
        """Why log-probs of a request with these settings would not be those that DESIGN asks for; what to do."""
        ...

    def generate(self, part: Part) -> Call:
        """Generate one sample."""
        ...

    def answer(self, answer: Any) -> Answer:
        """The answer to `generate`."""
        ...

    def abort(self, ids: Sequence[str]) -> Sequence[Call]:
        """End these parts; each is answered with what it has."""
        ...

    def pause(self, flush: bool) -> Sequence[Call]:
        """Return once no token is computed (nothing is under way); forget all keys and values when `flush`."""
        ...

    def resume(self) -> Sequence[Call]:
        """Undo `pause`."""
        ...

    def enter(self, payload: str) -> Call:
        """Have every rank call our entry point."""
        ...

    def entered(self, answer: Any) -> str:
        """What the ranks say went wrong, by the answer to `enter`; empty when nothing did."""
        ...

    def release(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """Give back memory. EngineError when the server was not started for that."""
        ...

    def reclaim(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """Take it again."""
        ...
