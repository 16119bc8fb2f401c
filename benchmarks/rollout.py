"""Rollout speed: the embedded engine against transformers' generate, same weights and prompts, in the same run.

    python benchmarks/rollout.py [--groups 8] [--samples 8] [--prompt 128] [--new 256] [--repeats 3]

On CUDA the model has the shapes of Qwen3-0.6B, random weights, bf16; on CPU it is smollm2, fp32. End-of-sequence is
ignored, so both generate exactly `--new` tokens a sample.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import write_result

from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import load_model, resolve
from stretto.types import Request, Sampling

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def checkpoint(device: torch.device, scratch: Path) -> Path:
    """smollm2 on CPU; random weights of Qwen3-0.6B's shapes on CUDA."""
    if device.type == "cpu":
        return resolve("smollm2")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**QWEN3_06B)).to(torch.bfloat16).save_pretrained(scratch)
    return scratch


def median_rate(run: Callable[[], object], tokens: int, device: torch.device, repeats: int) -> float:
    """Tokens per second: the median over `repeats`, after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return tokens / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in {"groups": 8, "samples": 8, "prompt": 128, "new": 256, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as scratch:
        directory = checkpoint(device, Path(scratch))
        model = load_model(directory, dtype).to(device).eval()
        engine = EmbeddedEngine(
            directory,
            None,
            device=device,
            dtype=dtype,
            eos_ids=(),
            max_length=args.prompt + args.new,
            max_sequences=10_000,
        )
    engine.adopt({name: model.get_parameter(name) for name in engine.layout().local(0)})
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40000, (args.groups, args.prompt), generator=generator)
    sampling = Sampling(max_new_tokens=args.new)
    requests = [Request(i, tuple(ids.tolist()), tuple(range(args.samples)), sampling) for i, ids in enumerate(prompts)]
    inputs = prompts.repeat_interleave(args.samples, 0).to(device)
    tokens = args.groups * args.samples * args.new

    def ours() -> None:
        assert sum(len(done.response_ids) for done in engine.generate(requests, deadline_s=3600)) == tokens

    @torch.no_grad()
    def theirs() -> None:
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=args.new,
            min_new_tokens=args.new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        assert out.shape[1] == args.prompt + args.new

    embedded = median_rate(ours, tokens, device, args.repeats)
    transformers = median_rate(theirs, tokens, device, max(1, args.repeats - 2))
    result = {
        "settings": vars(args)
        | {
            "device": device.type,
            "dtype": str(dtype),
            "model": "qwen3-0.6b shapes" if device.type == "cuda" else "smollm2",
        },
        "embedded_tokens_per_s": embedded,
        "transformers_tokens_per_s": transformers,
        "ratio": embedded / transformers,
    }
    print(
        f"embedded {embedded:,.0f} tok/s   transformers {transformers:,.0f} tok/s   ratio {embedded / transformers:.2f}"
    )
    write_result(f"rollout_{device.type}", result)


if __name__ == "__main__":
    main()
