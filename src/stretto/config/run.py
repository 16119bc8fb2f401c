"""The whole run file."""

from __future__ import annotations

from pydantic import Field, model_validator

from stretto.config.relevance import check_relevance
from stretto.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    LaunchConfig,
    MemoryConfig,
    ModeConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    SyncConfig,
    TelemetryConfig,
    TrainerConfig,
)


class RunConfig(Section):
    """Everything that decides a run. Two runs of the same file, seed and machine are the same run."""

    run_dir: str = "runs/{name}"
    """Directory of the run, relative to the current directory; `{name}` and `{seed}` are filled in.

    It must not hold another run.
    """
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the data order, the splits and every sample."""
    steps: int = Field(default=100, ge=1)
    """Rollout batches to generate and train on."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    mode: ModeConfig = ModeConfig()
    launch: LaunchConfig = LaunchConfig()
    placement: PlacementConfig = PlacementConfig()
    memory: MemoryConfig = MemoryConfig()
    sync: SyncConfig = SyncConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        check_relevance(self)
        return self

    @property
    def directory(self) -> str:
        """`run_dir` with its placeholders filled in."""
        return self.run_dir.replace("{name}", self.name).replace("{seed}", str(self.seed))
