"""Where the tests find a real vLLM."""

from __future__ import annotations

import os

import pytest

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # its first request would wait half a minute for a compiler
}


def vllm_python() -> str:
    """The interpreter that has vLLM, whose servers will be small and quick; skips the test where there is none."""
    python = os.environ.get("STRETTO_VLLM_PYTHON")
    if not python:
        pytest.skip("STRETTO_VLLM_PYTHON does not name an interpreter that has vLLM")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return python
