"""Reward functions that the tests name by file."""

import asyncio
import ctypes
import os
import re
import signal
import sys
import time

import helper_beside

NOT_CALLABLE = 3


def trl(prompts, completions, answer, **kwargs):
    assert len(kwargs["level"]) == len(prompts)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_completions_only(completions):
    return [len(c) for c in completions]


def trl_keyword_only(completions, *, completion_ids, level):
    return [sum(ids) + lv for ids, lv in zip(completion_ids, level, strict=True)]


def trl_everything_by_keyword(**kwargs):
    return [float(c == a) for c, a in zip(kwargs["completions"], kwargs["answer"], strict=True)]


def trl_chat(prompts, completions, **kwargs):
    return [
        float(p == [{"role": "user", "content": "q"}] and c[0]["role"] == "assistant" and c[0]["content"] == "7")
        for p, c in zip(prompts, completions, strict=True)
    ]


async def trl_async(completions, answer):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_that_logs(completions, answer, log_extra, log_metric=None):
    log_extra("answer", answer)
    log_metric("share", value=0.5)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_that_logs_by_keyword(completions, answer, **kwargs):
    kwargs["log_extra"]("answer", answer)
    kwargs["log_metric"](name="share", value=0.5)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "tests"
    return {"score": float(solution_str == ground_truth), "acc": True}


async def verl_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0)
    return extra_info["bonus"]


def simple(completion, answer):
    return completion == answer


def simple_positional(completion, answer, /, scale=10):
    return scale * (completion == answer)


_waiting = 0


async def simple_async(completion):
    """Returns only when all four samples of a group wait at the same time."""
    global _waiting
    _waiting += 1
    while _waiting < 4:
        await asyncio.sleep(0.001)
    return int(completion)


def other_simple(completion):
    return 0.0


def abstains_on_odd(completion):
    return None if int(completion) % 2 else 1.0


def length_one_group(completions, **kwargs):
    return [1.0]


def not_a_list(completions, **kwargs):
    return 1.0


def text_for_seven(completion):
    return "1.0" if completion == "7" else 1.0


def nan_for_seven(completion):
    return float("nan") if completion == "7" else 1.0


def group_crash_on_seven(completions, **kwargs):
    if "7" in completions:
        raise KeyError("seven is not allowed")
    return [0.0] * len(completions)


def crash_on_seven(completion):
    return {"8": 0.0}[completion] if completion == "7" else 0.0


def exits_on_seven(completion):
    if completion == "7":
        sys.exit(0)
    return 0.0


def dies_on_seven(completion):
    if completion == "7":
        os._exit(1)
    return 0.0


def killed_on_seven(completions, **kwargs):
    if "7" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(completions)


def segfaults_on_seven(completion):
    if completion == "7":
        ctypes.string_at(0)
    return 0.0


def hangs_on_seven(completions, **kwargs):
    while "7" in completions:
        pass
    return [0.0] * len(completions)


def raises_timeout(completion):
    raise TimeoutError("the judge did not answer")


def holds_the_gil(completion):
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))


def sleeps(completion):
    time.sleep(600)


def interrupted(completion):
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0


def environment(completion):
    heavy = {"torch", "transformers"} & set(sys.modules)
    return float(os.environ["OMP_NUM_THREADS"] == "1" and not heavy)


def asks_too_much(completion, rubric):
    return helper_beside.ONE


def raises_usage_like_error(completion):
    raise ValueError("bad literal")
