"""The beginning of a weight map for an architecture that has none: what names, shapes and the configuration tell."""

from stretto.models.scaffold.draft import Draft, begin
from stretto.models.scaffold.file import source_of

__all__ = ["Draft", "begin", "source_of"]
