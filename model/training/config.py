"""The whole configuration of a training run. Loads no torch, so a mistake is answered at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from data.sources import DataConfig
from model.config import GPTConfig, Place, Strict

Fraction = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1e6)]  # above, fp32 overflows in the optimizer itself


class TokenizerConfig(Strict):
    name: str


class OptimConfig(Strict):
    """AdamW for every parameter, or Muon for the weight matrices of the blocks and AdamW for the rest.

    `lr` is AdamW's and `muon_lr` Muon's peak rate. Both rise linearly over the first `warmup` fraction of
    the steps and fall over the last `decay` fraction to `min_lr_ratio` of the peak, which the last step has.
    """

    name: Literal["adamw", "muon"]
    lr: Rate
    muon_lr: Rate
    weight_decay: NonNegative
    betas: tuple[Momentum, Momentum]
    grad_clip: NonNegative
    warmup: Fraction
    decay: Fraction
    shape: Literal["cosine", "linear"]
    min_lr_ratio: Fraction

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimConfig:
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"optim.warmup={self.warmup} and optim.decay={self.decay} are fractions of train.steps "
                f"and sum to more than 1; lower one of them"
            )
        return self


class TrainConfig(Strict):
    """`batch_size` sequences make one step, of all processes together; each takes `micro_batch_size` at a time.

    `on_nonfinite` says what a loss or gradient that is no number does: `stop` the run before the update, or `skip`
    the step, at most `max_skips` in a row.
    """

    steps: PositiveInt
    batch_size: Annotated[int, Field(gt=0, le=1_000_000)]
    micro_batch_size: PositiveInt | None = None
    eval_interval: PositiveInt
    eval_tokens: PositiveInt | None = None
    save_interval: PositiveInt
    keep: PositiveInt
    log_interval: PositiveInt
    precision: Literal["auto", "fp32", "bf16"]
    device: str
    compile: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: PositiveInt = 10

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> TrainConfig:
        micro = self.micro_batch_size
        if micro and self.batch_size % micro:
            valid = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ValueError(
                f"train.micro_batch_size={micro} does not divide train.batch_size={self.batch_size}; "
                f"give one of {', '.join(map(str, valid))}"
            )
        return self


class LoggerConfig(Strict):
    """W&B. `auto` is online when a key is configured, else offline; metrics.jsonl is always written."""

    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    group: str | None = None
    tags: list[str]


class RunConfig(Strict):
    """A run. `objective` is what it learns to tell: `causal` the next token, `mlm` masked ones.

    The objective decides what attention sees: `mlm` sets model.causal=false, whatever was given.
    """

    objective: Literal["causal", "mlm"] = "causal"
    model: GPTConfig
    position: dict[str, Any]
    data: DataConfig
    tokenizer: TokenizerConfig
    optim: OptimConfig
    train: TrainConfig
    logger: LoggerConfig
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    init_from: Place | None = None
    run_dir: str | None = None
    resume: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _masked_tokens_are_told_from_both_sides(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("objective") == "mlm" and isinstance(values.get("model"), dict):
            return values | {"model": values["model"] | {"causal": False}}
        return values

    @model_validator(mode="after")
    def _is_language_model(self) -> RunConfig:
        if self.objective == "causal" and not self.model.causal:
            raise ValueError(
                "model.causal=false would see the tokens that it has to predict; train with true, or objective=mlm"
            )
        return self
