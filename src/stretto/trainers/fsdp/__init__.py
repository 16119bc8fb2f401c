"""The FSDP2 trainer: any Hugging Face causal language model, on one process or sharded over many."""

from stretto.trainers.fsdp.trainer import FSDPTrainer

__all__ = ["FSDPTrainer"]
