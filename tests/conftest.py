"""Models that many tests share: a tiny random one, made in a moment, and a cut of the real one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts this in the background has it ignore Ctrl-C, which every program that a test starts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers, grouped queries and a tied head, with a tokenizer of one id a character."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-model")
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the real SmolLM2-135M, as a checkpoint of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stretto.models.checkpoint import resolve

    directory = tmp_path_factory.mktemp("smollm2-cut")
    try:
        source = resolve("smollm2")
    except ValueError as error:
        if "STRETTO_SGLANG_PYTHON" not in os.environ:
            raise
        pytest.skip(f"a GPU machine without a network: {error}")
    model = AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=4)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process of its own: what Megatron needs in place of CUDA stays out of this one."""
    yield from _started(1, tmp_path_factory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of one gloo group."""
    yield from _started(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of one gloo group."""
    yield from _started(4, tmp_path_factory)


def _started(size: int, directories: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ended with their file of tests: the idle ranks of several files would fill a small machine's memory."""
    made = Ranks(size, directories.mktemp(f"ranks-{size}"))
    yield made
    made.close()


def character_tokenizer():
    """One id a character of printable ASCII and the line break, `<unk>` for others, `<eos>`, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<unk>", "<eos>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return tokenizer
