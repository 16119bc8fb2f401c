"""A backend of vLLM's weight update (init, start, update, finish) that takes what our receiver hands over."""

from __future__ import annotations

from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_NAME = "stretto"


class Transfer(WeightTransferEngine):
    """Whole tensors of the checkpoint, loaded layer by layer into the memory that the parameters have."""

    init_info_cls = update_info_cls = dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to agree on: the receiver has the connections."""

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all of `tensors`. What was not reached keeps its old weights when they end with an error."""
        try:
            self.receive_weights(update_info)
        except BaseException:
            self.finish_weight_update()
            raise

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load them."""
        self.model.load_weights(update_info["tensors"])

    def finish_weight_update(self) -> None:
        """Put every layer back to work."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(_NAME, Transfer)


def transfer_of(worker: Any) -> Transfer:
    """Our backend for a worker."""
    model = worker.model_runner.get_model()
    config = WeightTransferConfig(backend=_NAME)
    return WeightTransferEngineFactory.create_engine(config, worker.vllm_config, worker.device, model)
