"""What the embedded engine computes and keeps: each prompt once, each live sample's newest token, nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import DEADLINE_S, Served, new_engine, request, run, serve_alias
from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

from stretto.engines import EngineError
from stretto.engines.embedded import EmbeddedEngine
from stretto.engines.embedded.kv import PrefillStep
from stretto.types import Version


def module_of(served: Served) -> Any:
    assert isinstance(served.engine, EmbeddedEngine)
    return served.engine._module


def passes(served: Served) -> list[int]:
    """A list that grows by the token count of every forward pass."""
    sizes: list[int] = []
    embedding = module_of(served).get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    return sizes


def steps(served: Served) -> list[Any]:
    """A list that grows by the attention step of every forward pass."""
    seen: list[Any] = []
    module_of(served).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["stretto_step"]), with_kwargs=True
    )
    return seen


def test_a_group_of_eight_computes_its_prompt_once(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    sizes = passes(served)
    run(served.engine, request(0, served.prompt(30), range(8), max_new_tokens=5))
    assert sizes == [30, 8, 8, 8, 8]  # the last token is never fed back


def test_a_prompt_is_computed_once_though_its_group_waits_for_rows(tiny_model: Path) -> None:
    served = serve_alias(tiny_model, max_sequences=2)
    sizes = passes(served)
    run(served.engine, request(0, served.prompt(30), range(8), max_new_tokens=3))
    assert sizes == [30] + [2] * 8


def test_several_prompts_share_one_pass_without_padding(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    sizes = passes(served)
    run(served.engine, *(request(i, served.prompt(n), (0, 1), max_new_tokens=2) for i, n in enumerate((3, 50, 7))))
    assert sizes == [60, 6]


def test_keys_and_values_have_one_row_a_group_and_one_a_sample(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    seen = steps(served)
    run(served.engine, request(0, served.prompt(30), range(8), max_new_tokens=5))
    layers = served.reference.config.num_hidden_layers
    decode = seen[-1]
    assert len(decode.prompts) == len(decode.responses) == layers
    assert [tuple(slab.keys.shape) for slab in decode.prompts.values()] == [(1, 2, 30, 12)] * layers
    assert [tuple(slab.keys.shape) for slab in decode.responses.values()] == [(8, 2, 5, 12)] * layers


def test_finished_sequences_leave_the_batch(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    sizes = passes(served)
    short, long = (request(i, served.prompt(10), (i, i + 1), max_new_tokens=n) for i, n in enumerate((3, 6)))
    run(served.engine, short, long)
    assert sizes == [20, 4, 4, 2, 2, 2]


def test_freed_rows_are_taken_by_waiting_groups_at_once(tiny_model: Path) -> None:
    served = serve_alias(tiny_model, max_sequences=4)
    sizes = passes(served)
    run(served.engine, *(request(i, served.prompt(10), (0, 1), max_new_tokens=2 + 2 * i) for i in range(3)))
    assert sizes == [20, 4, 10, 4, 4, 2, 2, 2]


def test_no_token_is_computed_while_paused(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    sizes = passes(served)
    served.engine.pause()
    with pytest.raises(EngineError, match="paused"):
        list(served.engine.generate([request(0, served.prompt(10))], deadline_s=0.05))
    assert sizes == []


@contextmanager
def generating_inside_a_pass(served: Served) -> Iterator[Callable[[], object]]:
    """A generation in another thread that stands in its first forward pass until the given function is called."""
    inside, release = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        assert release.wait(DEADLINE_S)

    hook = module_of(served).register_forward_pre_hook(hold)
    generation = threading.Thread(target=run, args=(served.engine, request(0, served.prompt(10), max_new_tokens=2)))
    generation.start()
    assert inside.wait(DEADLINE_S)
    hook.remove()
    try:
        yield release.set
    finally:
        release.set()
        generation.join(DEADLINE_S)
        assert not generation.is_alive()


def test_pause_returns_only_after_the_pass_under_way(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    pause = threading.Thread(target=served.engine.pause)
    with generating_inside_a_pass(served) as release:
        pause.start()
        pause.join(0.2)
        assert pause.is_alive()
        release()
        pause.join(DEADLINE_S)
        assert not pause.is_alive()
        served.engine.resume()


def test_a_pass_that_does_not_end_is_an_error_of_who_waits_for_it_and_shuts_nothing(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    with generating_inside_a_pass(served):
        with pytest.raises(EngineError, match=r"pause: the forward pass under way did not end within 0\.02 s"):
            served.engine.pause(timeout_s=0.02)
        with pytest.raises(EngineError, match=r"prepare .* the forward pass under way did not end"):
            served.engine.prepare(Version(1, 1), timeout_s=0.02)
    assert len(run(served.engine, request(0, served.prompt(4)))) == 1
    served.publish(1)


def test_attention_of_the_prompts_of_one_pass_is_bounded_with_its_padding(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.engines.embedded.engine._PREFILL_TOKENS", 100)
    served = serve_alias(tiny_model, max_sequences=16)
    seen = steps(served)
    lengths = (120, 3, 3, 30, 30, 30, 5)
    run(served.engine, *(request(i, served.prompt(n), max_new_tokens=9) for i, n in enumerate(lengths)))
    assert [tuple(one.gather_GP.shape) for one in seen if isinstance(one, PrefillStep)] == [(1, 120), (3, 30), (3, 30)]


def test_a_malformed_request_costs_no_pass(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    sizes = passes(served)
    with pytest.raises(ValueError, match="request 1"):
        list(served.engine.generate([request(0, served.prompt(10)), request(1, ())], deadline_s=DEADLINE_S))
    assert sizes == []


def test_weights_that_overflow_are_an_error_and_not_a_token(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    with torch.no_grad():
        served.reference.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="no finite log-prob"):
        run(served.engine, request(3, served.prompt(10)))


def test_an_engine_without_weights_refuses(tiny_model: Path) -> None:
    engine = new_engine(tiny_model)
    with pytest.raises(EngineError, match="no weights"):
        engine.generate([request(0, (3, 4))], deadline_s=DEADLINE_S)
    engine.allocate()
    with pytest.raises(EngineError, match="no weights"):
        engine.generate([request(0, (3, 4))], deadline_s=DEADLINE_S)


SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
WINDOWED = {
    "mistral": lambda: MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=16),
    "qwen2": lambda: Qwen2Config(
        **SHAPE, num_key_value_heads=1, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, num_key_value_heads=1, head_dim=16, sliding_window=16),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_windowed_model_is_refused_with_the_engines_that_serve_it(
    family: str, save_tiny: Callable[[Any], Path]
) -> None:
    directory = save_tiny(WINDOWED[family]())
    with pytest.raises(ValueError, match=r"sliding.*SGLang.*vLLM"):
        new_engine(directory)


def test_a_model_that_could_have_a_window_but_has_none_is_served(save_tiny: Callable[[Any], Path]) -> None:
    served = serve_alias(save_tiny(MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=None)))
    assert len(run(served.engine, request(0, served.prompt(4)))) == 1
