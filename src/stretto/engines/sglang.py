"""SGLang as a rollout engine: any public version from 0.5.12 on, as it is."""

from __future__ import annotations

import base64
import os
import pickle
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

_ENTER = "stretto.engines.inside.sglang.enter"
_PREFILL_GRAPHS = {"disable_prefill_cuda_graph", "cuda_graph_backend_prefill", "cuda_graph_config"}
_TAGS: Mapping[Memory, str] = {"kv": "kv_cache", "weights": "weights"}
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class SglangEngine(ServerEngine):
    """See :class:`~stretto.engines.server.ServerEngine`.

    A seed decides a sample only with the option `enable_deterministic_inference` (otherwise SGLang ignores seeds), and
    there only among requests that all have filters, or all none: where one has, SGLang draws from sorted probabilities.
    """

    def __init__(self, *arguments: Any, tp: int, options: Mapping[str, Any], **named: Any):
        super().__init__(Sglang(tp=tp, options=options), *arguments, tp=tp, options=options, **named)


class Sglang:
    """How SGLang is spoken to. Its log-probs are those of softmax(logits / T), before filters."""

    name = "SGLang"
    section = "engine.sglang"
    list_options = (
        """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""
        + PRINT_PARSER
    )

    def __init__(self, *, tp: int, options: Mapping[str, Any]):
        self._tp, self._options = tp, options
        self._text = not options.get("skip_tokenizer_init")
        self._releases = bool(options.get("enable_memory_saver"))
        self._deterministic = bool(options.get("enable_deterministic_inference"))

    def own_options(self, setup: Setup) -> Mapping[str, Any]:
        """See the dialect."""
        return {
            **self._memory_options(setup),
            "model_path": str(setup.directory),
            "tokenizer_path": None,
            "dtype": setup.dtype,
            "context_length": setup.max_length,
            "max_running_requests": setup.max_sequences,
            "tp_size": setup.tp,
            "pp_size": None,
            "dp_size": None,
            "nnodes": None,
            "base_gpu_id": None,
            "sampling_defaults": "openai",  # not the checkpoint's: they would add filters and penalties
            "custom_weight_loader": [_ENTER] if setup.receiver else None,
            "api_key": None,
            "tokenizer_worker_num": None,
        }

    def _memory_options(self, setup: Setup) -> dict[str, Any]:
        """With its memory saver, SGLang refuses the graphs of prefills that it makes unless told not to."""
        chosen: dict[str, Any] = {}
        if setup.memory_share is not None:
            chosen["mem_fraction_static"] = setup.memory_share
        if setup.releases and not self._releases:
            chosen["enable_memory_saver"] = self._releases = True
        if self._releases and not _PREFILL_GRAPHS & self._options.keys():
            chosen["disable_prefill_cuda_graph"] = True
        return chosen

    def command(self) -> Sequence[str]:
        """See the dialect."""
        return ["-m", "sglang.launch_server"]

    def environment(self, setup: Setup) -> Mapping[str, str]:
        """See the dialect."""
        return {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "SGLANG_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S,
            **visible_devices(setup, os.environ),
        }

    def health(self) -> Call:
        """See the dialect."""
        return Call("/health", get=True)

    def introduction(self) -> Call:
        """See the dialect."""
        return Call("/server_info", get=True)

    def meet(self, answer: Any, setup: Setup) -> None:
        """See the dialect."""
        if (ranks := answer.get("tp_size", setup.tp)) != setup.tp:
            raise ValueError(f"the SGLang server has {ranks} ranks: set engine.tp = {ranks}")
        if setup.receiver and _ENTER not in (answer.get("custom_weight_loader") or ()):
            raise ValueError(
                "the SGLang server was started without our weight loader: start it with "
                f"--custom-weight-loader {_ENTER}, where stretto can be imported"
            )
        self._releases = bool(answer.get("enable_memory_saver"))
        self._deterministic = bool(answer.get("enable_deterministic_inference"))
        self._text = not answer.get("skip_tokenizer_init")

    def wrong_sampling(self, sampling: Sampling) -> str | None:
        """See the dialect."""
        if sampling.stop and not self._text:
            return (
                "it has stop strings, for which SGLang needs its tokenizer: leave out engine.sglang.skip_tokenizer_init"
            )
        if sampling.min_p > 0 and self._deterministic:
            return (
                "it has min_p, on which SGLang's deterministic mode ends with a failed assertion: leave out "
                "engine.sglang.enable_deterministic_inference"
            )
        return None

    def generate(self, part: Part) -> Call:
        """See the dialect. Its randomness is a function of seed and position, so every part has the same seed."""
        sampling = part.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": part.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": part_seed(part.seed, 0),
            # It would ignore the stop ids as well; its own ends of a sequence are among ours.
            "ignore_eos": not part.stop_ids,
            "stop_token_ids": list(part.stop_ids),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        body = {
            "rid": part.id,
            "input_ids": list(part.prompt_ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        return Call("/generate", body)

    def answer(self, answer: Any) -> Answer:
        """See the dialect. A response that was aborted before it began has neither tokens nor log-probs."""
        try:
            about = answer["meta_info"]
            finish = about["finish_reason"]
            said, matched = (None, None) if finish is None else (finish["type"], finish.get("matched"))
            entries = about.get("output_token_logprobs") or ()
            logprobs = tuple(float(one[0]) for one in entries)
            others = tuple(one[1] for one in entries)
            ids = tuple(answer["output_ids"] or ())
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"SGLang's answer is malformed ({error!r}): {str(answer)[:500]}") from error
        if others != ids:
            raise EngineError(f"SGLang's log-probs are of the tokens {others[:20]}, its answer of {ids[:20]}")
        if said not in _REASONS or (said == "stop" and matched is None):
            raise EngineError(f"SGLang's answer does not say why the response ended (finish_reason {finish})")
        return Answer(ids, logprobs, _REASONS[said], f"finish_reason {finish}")

    def abort(self, ids: Sequence[str]) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/abort_request", {"rid": id}) for id in ids]

    def pause(self, flush: bool) -> Sequence[Call]:
        """See the dialect. Its mode "abort" looks once a second whether all have ended; `enter` flushes by itself.

        Mode "retract" also settles the last batch, without which SGLang does not hold itself for idle.
        """
        return [Call("/pause_generation", {"mode": "retract"})]

    def resume(self) -> Sequence[Call]:
        """See the dialect. It would give back cached device memory at every turn, which takes milliseconds."""
        return [Call("/continue_generation", {"torch_empty_cache": False})]

    def enter(self, payload: str) -> Call:
        """See the dialect."""
        body = {
            "serialized_named_tensors": [_serialized(payload)] * self._tp,
            "load_format": _ENTER,
            "flush_cache": True,
        }
        return Call("/update_weights_from_tensor", body)

    def entered(self, answer: Any) -> str:
        """See the dialect. It refuses the call when a rank failed."""
        return ""

    def release(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/release_memory_occupation", {"tags": self._tags(parts)})]

    def reclaim(self, parts: Sequence[Memory]) -> Sequence[Call]:
        """See the dialect."""
        return [Call("/resume_memory_occupation", {"tags": self._tags(parts)})]

    def _tags(self, parts: Sequence[Memory]) -> list[str]:
        if not self._releases:
            raise EngineError(
                "SGLang was not started to give its memory back: set memory.release, or for a server that runs already "
                "start it with --enable-memory-saver"
            )
        return [_TAGS[part] for part in parts]


def _serialized(payload: str) -> str:
    """A list of one named tensor that holds the payload's bytes, as SGLang's MultiprocessingSerializer would be read.

    Its own serializer puts a CPU tensor into shared memory that the sender has to keep. Here the numbers travel inside
    of the pickle, and `torch.ByteTensor`, which its unpickler admits, makes a tensor of them there.
    """
    return base64.b64encode(pickle.dumps([("payload", _Bytes(payload.encode()))], protocol=4)).decode()


class _Bytes:
    """Arrives as a uint8 tensor."""

    def __init__(self, data: bytes):
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, (list(self._data),)
