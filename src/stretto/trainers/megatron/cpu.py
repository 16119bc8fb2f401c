"""Stand-ins that let Megatron-Core run without CUDA, on gloo: for laptops and CI. With CUDA nothing is touched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "ones_like", "arange")
_enabled = False


def enable() -> None:
    """Put the stand-ins in place, once, if there is no CUDA. Each is for something Megatron-Core takes for granted.

    * `torch.cuda.current_device` says "cpu" and `set_device` does nothing: the device of new parameters, of receive
      buffers, of the gathered halves of a tensor.
    * torch's factories read `device="cuda"` as the CPU: the schedules' token counts, the causal mask, the optimizer's
      norms and scales. `Tensor.cuda` is the identity: the tied head's copy of the embedding.
    * The CUDA generator's state is the CPU generator's: the model-parallel generators, which initialise weights.
    * Streams and events are empty and `synchronize` returns: the data-parallel buffers, the experts' dispatcher.
    * `Tensor.type` names a CUDA type when Megatron asks, and only then: its optimizers sort parameters by that name.
    * The experts' dispatcher gets its counts as numbers, which it would otherwise only make of CUDA tensors.
    * Parts of unequal length, the tokens of expert-tensor ranks, are gathered and scattered by a sum; gloo has no
    other.
    * Functions that Megatron would compile run as they are: a compiler is neither needed nor at hand.
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    _enabled = True
    _uncompiled()
    _devices()
    _generators()
    _streams()
    _types()
    _counts()
    _unequal_parts()


def _replace(owner: Any, **replacements: Any) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _nothing() -> Callable[..., None]:
    """A function that does nothing; one for each place, since torch's compiler tells functions by identity."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing


def _devices() -> None:
    def current_device() -> str:
        return "cpu"

    def cuda(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    from torch.utils import _device

    # `with torch.device("meta")` knows torch's own factories, a set that it makes at its first use: before they go.
    _device._device_constructors()
    _replace(torch.cuda, current_device=current_device, set_device=_nothing(), synchronize=_nothing())
    _replace(Tensor, cuda=cuda)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory, reading a CUDA device as the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _generators() -> None:
    from megatron.core.tensor_parallel import random

    def get_state(*_: Any, **__: Any) -> Tensor:
        return torch.get_rng_state()

    def set_state(new_state: Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    _replace(torch.cuda, get_rng_state=get_state, set_rng_state=set_state, manual_seed=manual_seed)
    _replace(random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


class _Stream:
    """A stream or an event: the CPU does one thing after another, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing()

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


def _streams() -> None:
    only = _Stream()

    def stream(*_: Any, **__: Any) -> nullcontext[None]:
        return nullcontext()

    def current(*_: Any, **__: Any) -> _Stream:
        return only

    _replace(torch.cuda, Stream=_Stream, Event=_Stream, stream=stream, current_stream=current, default_stream=current)


def _types() -> None:
    original = Tensor.type

    def type_(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(tensor, *args, **kwargs)
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(name, str) and asker.startswith("megatron.core."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    _replace(Tensor, type=type_)


def _counts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=on_host)


def _unequal_parts() -> None:
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(part: Tensor, group: Any, sizes: list[int] | None = None, shared_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, shared_buffer)
        whole = part.new_zeros(sum(sizes), *part.shape[1:])
        whole.split(sizes)[group.rank()].copy_(part)
        dist.all_reduce(whole, group=group)
        return whole

    def scattered(whole: Tensor, group: Any, sizes: list[int] | None = None, shared_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, sizes, shared_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    _replace(mappings, _gather_along_first_dim=gathered, _reduce_scatter_along_first_dim=scattered)


def _uncompiled() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    compiled = vars(TopKRouter)["_apply_expert_bias"]
    TopKRouter._apply_expert_bias = getattr(compiled, "_torchdynamo_orig_callable", compiled)
