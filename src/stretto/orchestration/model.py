"""The checkpoint that a run starts from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.config import RunConfig
from stretto.models import checkpoint as models


@dataclass(frozen=True)
class Model:
    """The checkpoint that a run starts from."""

    directory: Path
    tokenizer: Any
    max_length: int

    @classmethod
    def load(cls, config: RunConfig) -> Model:
        """Find it, read its configuration and its tokenizer. Raises ValueError for what cannot be read."""
        directory = models.resolve(config.model.path)
        longest = models.longest_sequence(models.load_config(directory), config.model.max_length)
        return cls(directory, models.load_tokenizer(directory), longest)

    @cached_property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return models.load_config(self.directory).get_text_config().vocab_size

    @cached_property
    def tokenizer_digest(self) -> str:
        """A hash of which text has which id: token ids mean nothing to a model with another one."""
        table = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.blake2b(table.encode(), digest_size=16).hexdigest()
