"""vLLM's side: what its worker extension adds to every worker."""

from __future__ import annotations

from typing import Any

from stretto.engines.inside.base import Inside, Named
from stretto.engines.inside.derived import derived
from stretto.engines.inside.receiver import enter


class Worker:
    """Named in `--worker-extension-cls`; its method is called through `collective_rpc`."""

    def stretto_enter(self, payload: str) -> None:
        """Serve the trainer that `payload` names; see :func:`~stretto.engines.inside.receiver.enter`."""
        worker: Any = self

        def load(named: Named) -> None:
            worker.reload_weights(weights_iterator=named)

        model = worker.model_runner.get_model()
        enter(payload, Inside(model, worker.rank, worker.device, lambda: derived(model), load))
