"""Every option: one small pydantic model per concern. The docstring under a field is its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PRESETS = Path(__file__).parent / "presets"
DEMO_CHATS = PRESETS / "demo_chats.jsonl"


class Section(BaseModel):
    """Strict: an unknown key is an error; the docstring under each field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class TargetConfig(Section):
    """The frozen target model."""

    model: str = "demo"
    """Local folder, GGUF file, hub name, `demo` (SmolLM2-135M-Instruct from its package) or `random:SHAPE`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of the frozen weights and of the features; auto is bfloat16 on GPUs, float32 on CPU."""
    layer_ids: list[int] | None = Field(None, min_length=1)
    """0-based decoder layers whose outputs are tapped; default: evenly spread, as the paper does."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the target's layers too; targets then take turns at the gate as drafters do. auto: on GPUs."""
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """Attention over packed documents; auto is flex (no dense mask) where layers are compiled on a GPU, else sdpa."""


class DrafterConfig(Section):
    """The DFlash drafter; every size not given here is taken from the target."""

    layers: int = Field(5, ge=1)
    """Draft layers."""
    block_size: int = Field(16, ge=2, le=64)
    """Tokens of a block: the anchor and block_size - 1 proposals."""
    mask_token_id: int | None = None
    """Token id of a masked position; default: the first embedding row that no token of the tokenizer uses."""
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """Attention backend; auto is compiled FlexAttention on GPUs and SDPA with the same mask on CPU."""
    init_from: Path | None = None
    """Folder of an exported drafter to start from instead of random weights."""


class DataConfig(Section):
    """Training and held-out chats."""

    path: str = str(DEMO_CHATS)
    """JSONL file of chats (`messages` or `conversations`), or a hub dataset name."""
    eval_path: str | None = None
    """JSONL file of held-out chats or prompts; default: `holdout` chats taken out of `path`."""
    holdout: int = Field(32, ge=0)
    """Chats kept out of training for acceptance length when `eval_path` is not given."""
    row_length: int = Field(3072, ge=32)
    """Tokens of a packed row. One length per run, so that every step has one shape."""
    max_chats: int | None = Field(None, ge=1)
    """Use only the first chats of the file."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant turns carry loss."""


class TrainConfig(Section):
    """Optimisation of the drafter."""

    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps; default: `epochs` passes over the rows."""
    epochs: float = Field(6.0, gt=0)
    """Passes over the rows when `max_steps` is not given."""
    accumulation: int = Field(1, ge=1)
    """Packed rows per drafter and optimizer step."""
    draws_per_row: int = Field(1, ge=1)
    """Micro-batches that a fetched row serves, each with its own anchors; more than 1 where targets are the slower
    side."""
    anchors: int = Field(512, ge=1)
    """Blocks per packed row."""
    lr: float = Field(6e-4, gt=0)
    """Peak learning rate of AdamW."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up; wsd is warm-up, stable, then linear decay over the last 20 %."""
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    """Share of the steps that warm the learning rate up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    loss: Literal["decay", "dpace"] = "decay"
    """Position weights: exponential decay (paper, Eq. 4) or D-PACE (arXiv 2605.18810)."""
    gamma: float | None = Field(None, gt=0)
    """Decay of the position weights; default by block size: 7 for 16, 5 for 10, 4 for 8."""
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    """Smoothing of D-PACE."""
    precision: Literal["auto", "bf16", "float32", "float8"] = "auto"
    """Compute precision; auto is bf16 on GPUs, float32 on CPU; float8: GEMMs of block rows and of the head. Master
    weights are float32 always."""
    seed: int = 0
    """Seed of weights, row order and anchors."""
    max_bad_steps: int = Field(3, ge=0)
    """Steps with a non-finite gradient that are skipped before the run stops."""


class TopologyConfig(Section):
    """Targets and drafters of one node."""

    split: Literal["default", "auto"] = "default"
    """auto: choose targets and drafters by measured rates, or by the cost model while there are none."""
    targets: int | None = Field(None, ge=1)
    """Targets per node; default: what is left beside the drafters, 5 of 8."""
    drafters: int | None = Field(None, ge=1)
    """Drafters per node; default: 3 of 8, 1 of 2."""
    target_tp: int = Field(1, ge=1)
    """Ranks that share one target."""
    rows_in_flight: int = Field(2, ge=1, le=64)
    """Feature rows a target may hold ready ahead of its drafters."""


class CompileConfig(Section):
    """The compile gate and its cache."""

    turns: Literal["ordered", "leader_first", "parallel"] = "ordered"
    """How drafter ranks pass the gate: one by one, the first alone then the rest, or all at once."""
    turn_timeout: float = Field(900.0, gt=0)
    """Seconds one turn may take."""
    cache_dir: Path | None = None
    """Root of the compile cache; default: the user's cache folder."""
    on_recompile: Literal["error", "warn"] = "error"
    """What a recompile or graph break after the gate does."""


class RuntimeConfig(Section):
    """Devices, deadlines and the run folder."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where NVML finds any, else CPU."""
    share_gpus: bool = False
    """Let several ranks use one GPU: rows then go by CUDA IPC, through host memory only where that is forbidden."""
    run_dir: Path = Path("runs/demo")
    """Folder of the run; each start of it is a numbered attempt."""
    resume: str = "auto"
    """auto (newest valid checkpoint of the run folder), none, or the path of a checkpoint."""
    init_timeout: float = Field(180.0, gt=0)
    """Seconds until every rank has joined."""
    load_timeout: float = Field(1800.0, gt=0)
    """Seconds for weights and data; the default grows with the target."""
    step_timeout: float = Field(300.0, gt=0)
    """Seconds one step may take; the default grows with the work."""
    first_step_timeout: float | None = Field(None, gt=0)
    """Seconds the first step of a start may take; default: three times `step_timeout`."""
    save_timeout: float = Field(600.0, gt=0)
    """Seconds one checkpoint may take; the default grows with its size."""
    eval_timeout: float = Field(1800.0, gt=0)
    """Seconds one evaluation may take; the default grows with the target, the prompts and their tokens."""
    shutdown_timeout: float = Field(10.0, gt=0)
    """Seconds from a rank's goodbye to the end of its process; the default grows with the memory to give back."""
    heartbeat_timeout: float = Field(60.0, gt=0)
    """Seconds a rank may be silent (stopped, GIL held) before the others give it up."""
    grace: float = Field(30.0, gt=0)
    """Seconds from a stop signal to the end of all; a save that still goes on 2 s (or a fifth) before it is cut off."""
    gpu_wait: float = Field(60.0, ge=0)
    """Seconds to wait at the start for GPUs that other processes hold, before the run is refused."""
    memory_interval: float = Field(1.0, gt=0)
    """Seconds between two memory samples."""
    memory_snapshot: bool = False
    """Record who allocates what (slower), and save it beside the logs when GPU memory runs out."""


class CheckpointConfig(Section):
    """What is saved, and how long it is kept."""

    every: int = Field(500, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; the newest valid one is never removed."""
    asynchronous: bool = True
    """Write checkpoints in the background; an error shows at the next step. The last save is waited for."""
    max_failed_saves: int = Field(3, ge=1)
    """Saves in a row that may fail (full disk) before the run stops."""


class EvalConfig(Section):
    """Acceptance length by real speculative decoding on held-out prompts."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    prompts: int = Field(0, ge=0)
    """Held-out prompts to decode; 0 turns the evaluation off."""
    max_new_tokens: int = Field(64, ge=1)
    """Tokens decoded per prompt."""


class LogConfig(Section):
    """Console and metrics."""

    every: int = Field(10, ge=1)
    """Steps between two lines on the console."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    wandb: str | None = None
    """Weights & Biases project; off by default."""
