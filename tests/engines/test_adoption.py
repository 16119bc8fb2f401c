"""A server that runs already says what it was started with; what cannot serve the run is refused with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.engines.server.dialect import Setup
from stretto.engines.sglang import Sglang
from stretto.engines.vllm import Vllm
from stretto.types import Sampling


def setup(**changes: Any) -> Setup:
    settings: dict[str, Any] = {
        "directory": Path("model"),
        "dtype": "bfloat16",
        "max_length": 64,
        "max_sequences": 8,
        "tp": 2,
        "device": torch.device("cuda", 0),
        "filters": False,
        "receiver": True,
    }
    return Setup(**{**settings, **changes})


SGLANG = {"tp_size": 2, "custom_weight_loader": ["stretto.engines.inside.sglang.enter"]}


def vllm(tp: int = 2, **model: Any) -> dict[str, Any]:
    parallel = {"tensor_parallel_size": tp, "worker_extension_cls": "stretto.engines.inside.vllm.Worker"}
    return {"vllm_config": {"parallel_config": parallel, "model_config": model}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SGLANG | {"tp_size": 4}, r"has 4 ranks: set engine\.tp = 4"),
        (
            SGLANG | {"custom_weight_loader": None},
            r"start it with --custom-weight-loader stretto\.engines\.inside\.sglang\.enter",
        ),
    ],
)
def test_an_sglang_server_that_cannot_serve_is_refused(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sglang(tp=2, options={}).meet(answer, setup())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (vllm(1), r"has 1 ranks: set engine\.tp = 1"),
        (vllm(logprobs_mode="raw_logits"), "needs --logprobs-mode processed_logprobs"),
        ({"vllm_config": {}}, r"start it with --worker-extension-cls stretto\.engines\.inside\.vllm\.Worker"),
    ],
)
def test_a_vllm_server_that_cannot_serve_is_refused(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Vllm(filters=False, on_gpu=True, options={}).meet(answer, setup())


def test_what_a_server_can_do_is_what_it_was_started_with() -> None:
    sglang = Sglang(tp=2, options={})
    sglang.meet(SGLANG | {"enable_memory_saver": True, "skip_tokenizer_init": True}, setup())
    assert [call.path for call in sglang.release(("kv",))] == ["/release_memory_occupation"]
    assert "skip_tokenizer_init" in (sglang.wrong_sampling(Sampling(4, stop=("x",))) or "")
    other = Vllm(filters=False, on_gpu=True, options={})
    other.meet(vllm(logprobs_mode="processed_logprobs", enable_sleep_mode=True), setup())
    assert [call.path for call in other.release(("kv", "weights"))] == ["/sleep"]
    assert [call.query.get("tags") for call in other.reclaim(("weights",))][:1] == ["weights"]


def test_a_server_without_our_code_serves_runs_that_publish_nothing_into_it() -> None:
    Sglang(tp=2, options={}).meet({"tp_size": 2, "custom_weight_loader": []}, setup(receiver=False))
