"""What only a vLLM server of its own shows: filters, options, and its death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import DEADLINE_S, filtered_by_transformers, reference_logits, reference_logprobs, request, run
from servers import QUICK, processes_of, vllm, worker_of
from test_server_process import all_gone

from stretto.engines import EngineError
from stretto.engines.server import ServerEngine
from stretto.engines.server.options import command_line, installed_options
from stretto.engines.vllm import Vllm
from stretto.models.checkpoint import load_model
from vllm_here import vllm_python


@pytest.fixture(scope="module")
def engine(deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    """Started for filters, without our code inside."""
    log = tmp_path_factory.mktemp("vllm-filters") / "server.log"
    engine = vllm().start(deep_model, filters=True, receiver=False, log=log)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(deep_model: Path) -> Any:
    return load_model(deep_model, torch.float32).eval()


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_filters_choose_tokens_but_logprobs_are_of_the_whole_distribution(
    engine: ServerEngine, reference: Any, filters: dict[str, Any]
) -> None:
    one = request(0, range(5, 14), range(8), max_new_tokens=12, **filters)
    for completion in run(engine, one).values():
        ids = completion.response_ids
        expected = reference_logprobs(reference, one.prompt_ids, ids)
        assert completion.logprobs_T == pytest.approx(expected.tolist(), abs=1e-5, rel=0)
        allowed_TV = filtered_by_transformers(reference_logits(reference, one.prompt_ids, ids), filters).isfinite()
        assert all(allowed_TV[t, token] for t, token in enumerate(ids))


@pytest.mark.parametrize(("temperature", "refused"), [(0.7, True), (1.0, False), (0.0, False)])
def test_log_probs_at_a_temperature_with_filters_are_refused_with_what_to_do(
    engine: ServerEngine, reference: Any, temperature: float, refused: bool
) -> None:
    one = request(7, range(5, 14), temperature=temperature, top_p=0.9)
    if refused:
        with pytest.raises(ValueError, match=r"request 7: temperature is 0\.7; .* set rollout\.temperature = 1"):
            engine.generate([one], deadline_s=DEADLINE_S)
        return
    got = run(engine, one)[7, 0]
    expected = reference_logprobs(reference, one.prompt_ids, got.response_ids)
    assert got.logprobs_T == pytest.approx(expected.tolist(), abs=1e-5, rel=0)


def test_filters_of_a_server_without_them_are_refused() -> None:
    said = Vllm(filters=False, on_gpu=False, options={}).wrong_sampling(request(0, (1,), top_k=3).sampling)
    assert said is not None
    assert "started for requests without" in said


def test_options_are_those_of_the_installed_version() -> None:
    known = installed_options(vllm_python(), Vllm.list_options, "vLLM")
    words = command_line({"enforce_eager": True, "gpu_memory_utilization": 0.5}, {}, known, "engine.vllm")
    assert words == ["--enforce-eager", "--gpu-memory-utilization", "0.5"]
    assert command_line({"enable_prefix_caching": False}, {}, known, "engine.vllm") == ["--no-enable-prefix-caching"]
    with pytest.raises(ValueError, match=r"engine\.vllm\.enforce_egar is no option .* enforce_eager"):
        command_line({"enforce_egar": True}, {}, known, "engine.vllm")


def test_an_option_that_the_server_refuses_is_in_the_error(deep_model: Path, tmp_path: Path) -> None:
    options = {**QUICK, "max_num_batched_tokens": -5}
    with pytest.raises(
        EngineError, match=r"(?s)vLLM ended with exit code .* before it served; .*max_num_batched_tokens"
    ):
        vllm().start(deep_model, options=options, log=tmp_path / "server.log")


def test_a_server_without_our_code_is_not_adopted_for_publications(engine: ServerEngine, deep_model: Path) -> None:
    with pytest.raises(ValueError, match="started without our worker extension"):
        vllm().start(deep_model, url=engine.base_url, options={}, filters=True, log=Path("unused.log"))
    with pytest.raises(ValueError, match="gives raw_logprobs, and this run needs --logprobs-mode processed_logprobs"):
        vllm().start(deep_model, url=engine.base_url, options={}, receiver=False, log=Path("unused.log"))


def test_entering_a_server_without_our_code_is_an_error(engine: ServerEngine) -> None:
    with pytest.raises(EngineError, match=r"answered 500: .*stretto_enter"):
        engine.enter("{}", 10.0)


def generating(engine: ServerEngine) -> tuple[threading.Thread, list[BaseException]]:
    """Generates in a thread; the list gets what it raises."""
    raised: list[BaseException] = []
    requests = [request(0, range(5, 14), max_new_tokens=1), request(1, range(5, 14), range(4), max_new_tokens=440)]
    begun = threading.Event()

    def work() -> None:
        try:
            for _ in engine.generate(requests, deadline_s=DEADLINE_S):
                begun.set()
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(DEADLINE_S)
    return thread, raised


def segments_of(processes: list[int]) -> set[Path]:
    """Shared memory that they have mapped."""
    lines = [line for one in processes for line in Path(f"/proc/{one}/maps").read_text().splitlines()]
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}


def test_a_server_that_is_killed_in_a_generation_is_named_and_leaves_nothing(engine: ServerEngine) -> None:
    """The last of this file, for its server is gone then."""
    processes = processes_of(engine)
    segments = segments_of(processes)
    thread, raised = generating(engine)
    os.kill(worker_of(engine), signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert "vLLM at http" in str(raised[0])
    engine.close()
    assert all_gone(processes)
    assert [one for one in segments if one.exists()] == []
