"""vLLM's side: what its worker extension adds to every worker."""

from __future__ import annotations

from typing import Any

from stretto.engines.inside.base import Inside, Named
from stretto.engines.inside.derived import derived
from stretto.engines.inside.receiver import enter


class Worker:
    """Named in `--worker-extension-cls`; its method is called through `collective_rpc`."""

    def stretto_enter(self, payload: str) -> str | None:
        """Serve the trainer that `payload` names; see :func:`~stretto.engines.inside.receiver.enter`.

        Returns what went wrong: when one rank raises, vLLM leaves the others' answers to be read by its next call.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        try:
            enter(
                payload,
                Inside(model, worker.rank, worker.device, lambda: derived(model), lambda named: load(worker, named)),
            )
        except Exception as error:
            return f"rank {worker.rank}: {type(error).__name__}: {error}"
        return None


def load(worker: Any, named: Named) -> None:
    """Whole tensors of the checkpoint, in vLLM's weight update by phases where this version has it, else its reload.

    The phases are called here, on the worker: between calls over HTTP an update would stay open when a trainer dies.
    """
    if not _updates_in_phases(worker):
        _reload(worker, named)
        return
    worker.start_weight_update()
    worker.update_weights({"tensors": named})
    worker.finish_weight_update()


def _updates_in_phases(worker: Any) -> bool:
    """Whether the worker's updates go through our backend, which is made at the first one."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngine  # type: ignore[import-not-found]
    except ImportError:
        return False
    if not hasattr(WeightTransferEngine, "start_weight_update"):
        return False
    from stretto.engines.inside.vllm_transfer import Transfer, transfer_of

    if worker.weight_transfer_engine is None:
        worker.weight_transfer_engine = transfer_of(worker)
        worker.init_weight_transfer_engine({})
    return isinstance(worker.weight_transfer_engine, Transfer)


def _reload(worker: Any, named: Named) -> None:
    if getattr(worker, "stretto_broken_off", False):
        raise RuntimeError("an earlier reload of vLLM's was broken off, from which it does not recover: start it anew")
    worker.stretto_broken_off = True
    worker.reload_weights(weights_iterator=named)
    worker.stretto_broken_off = False
