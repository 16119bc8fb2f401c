"""Prompt sources, what their columns mean, chat templates, and the stream of training prompts."""

from stretto.data.prompts import PromptSet, load_prompts, split_heldout
from stretto.data.sources import read_rows
from stretto.data.stream import PromptStream

__all__ = ["PromptSet", "PromptStream", "load_prompts", "read_rows", "split_heldout"]
