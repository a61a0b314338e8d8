"""What a finding consists of: the schema of conf/finding/*.yaml and conf/scale/*.yaml."""

from __future__ import annotations

import copy
import math
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from model.config import CONF, Strict, nearest, validate

OPERATIONS = {"ratio", "difference", "max", "min", "mean", "undefined"}


FIXED_NAMES = {
    "probe": {"probe_embeddings", "probe_best", "probe_last", "untrained_best"},
    "shuffle": {"rise@all", "rise@keep_1", "rise@keep_8"},
    "bigram": {"bigram_loss"},
    "bound": {"bound_ratio"},
    "memory": {"saved_mb"},
    "speed": {"token_cost"},
    "exact": {"exact_within", "exact_beyond"},
}


class Longer(Strict):
    """How `longer: true` runs are trained: `tokens` times as long, and with one of the scale's smaller models."""

    tokens: PositiveFloat = 1.0
    size: str | None = None


class Scale(Strict):
    """How large runs are. Findings give lengths as multiples of `length`, and budgets as parts of `tokens`."""

    title: str
    length: PositiveInt  # L, the trained length in tokens
    tokens: PositiveInt  # of a full training
    batch_tokens: PositiveInt  # of a step
    micro_tokens: PositiveInt | None = None  # of a forward; null: all of a step
    val_tokens: PositiveInt | None  # scored by each measure of loss; null: the whole split
    probe_steps: PositiveInt  # of the classifiers that look for positions in hidden states
    probe_windows: PositiveInt  # of text that they learn from
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)]
    judged: bool  # false where runs are too small for a verdict
    overrides: list[str]  # of every run
    sizes: dict[str, list[str]]  # overrides of smaller models
    longer: Longer = Longer()
    note: str = ""  # shown on each page, such as an estimate of cost

    @model_validator(mode="after")
    def _seeds_differ(self) -> Scale:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"scale.seeds={self.seeds}: the same seed twice is no second run; give different ones"
            )
        return self

    def tokens_of(self, run: RunSpec) -> float:
        """What it is trained on, as a part of `tokens`."""
        return run.tokens * (self.longer.tokens if run.longer else 1.0)

    def size_of(self, run: RunSpec) -> str | None:
        """Its name in `sizes`; None for the usual one, and for a run that takes the weights of another."""
        return self.longer.size if run.longer and not (run.size or run.start) else run.size


class Measure(Strict):
    """What is measured on a finished run. Results have the names that `measure.py` gives them."""

    kind: Literal[
        "loss", "retrieval", "probe", "shuffle", "bigram", "exact", "bound", "scores", "memory", "speed"
    ]
    lengths: list[PositiveFloat] = Field([1.0])  # multiples of the scale's L
    protocol: Literal["non_overlapping", "sliding", "last"] = "non_overlapping"
    longest: PositiveFloat = 1.0  # that of the finding, so that all its losses are of the same tokens

    def names(self) -> set[str]:
        """The names of what it gives."""
        if self.kind in FIXED_NAMES:
            return FIXED_NAMES[self.kind]
        by_length = {"retrieval": ("retrieves_to", "found"), "scores": ("score_within", "score_beyond")}
        if self.kind in by_length:
            return {f"{name}@{multiple:g}L" for name in by_length[self.kind] for multiple in self.lengths}
        behind = "" if self.protocol == "non_overlapping" else f"/{self.protocol}"
        named = {f"{name}@{m:g}L{behind}" for name in ("loss", "ppl", "bits") for m in self.lengths}
        return named | {f"beyond@{m:g}L{behind}" for m in self.lengths if m > 1}


class RunSpec(Strict):
    """A training, or with `tokens: 0` and `start` another way to read the weights of one, such as a scaling.

    `start` names the run whose weights it starts from. `tune` holds options, each some overrides, to choose from by
    validation loss on the scale's first seed; another run can use what was chosen by naming this one in `tuned_as`.
    `batch` is a part of the scale's tokens of a step.
    """

    overrides: list[str] = Field([])
    length: PositiveFloat = 1.0
    tokens: NonNegativeFloat = 1.0
    batch: PositiveFloat = 1.0
    size: str | None = None  # one of the scale's sizes
    longer: bool = False  # as the scale says what that is
    start: str | None = None
    tune: list[str] = Field([])
    tuned_as: str | None = None
    validations: PositiveInt = 1  # over a training, evenly spaced
    measures: list[Measure] = Field([])

    def names(self) -> set[str]:
        """The names of its results."""
        return {"val_loss", "tokens", "tokens_per_s"}.union(*(measure.names() for measure in self.measures))


class Claim(Strict):
    """A sentence of a paper, and the number that decides about it. Thresholds are set before any run.

    The statistic is computed for each seed, so runs are paired where they share one. `below` and `above` bound its
    95 % interval; with both, it must lie between.
    """

    id: str
    sentence: str
    source: str
    statistic: str | dict[str, Any]
    below: float = math.inf
    above: float = -math.inf
    why: str  # the threshold
    needs_scale: bool = False
    superseded_by: str | None = None  # the claim that asks the same in a better way

    model_config = Strict.model_config | {"allow_inf_nan": True}

    def operands(self) -> list[str]:
        """The results that the statistic is made of, as `run.result`."""
        return _operands(self.statistic)

    def runs(self) -> set[str]:
        """The runs that have these."""
        return {operand.partition(".")[0] for operand in self.operands()}

    @model_validator(mode="after")
    def _asks_for_something(self) -> Claim:
        if self.below == math.inf and self.above == -math.inf:
            raise ValueError(f"claim {self.id}: neither below nor above; every number would do")
        return self


class Figure(Strict):
    """`x` is the length that was evaluated, the tokens of training, or the layer of a probe."""

    title: str
    x: Literal["length", "tokens", "layer"]
    runs: list[str]
    protocol: str = "non_overlapping"


class Finding(Strict):
    name: str
    title: str
    paper: str
    differs: str  # from the paper
    discussion: str = ""  # what else was measured about the verdicts, written after them
    longest: PositiveFloat  # window of any of its measures of loss, in multiples of L
    runs: dict[str, RunSpec]
    claims: list[Claim]
    figures: list[Figure] = Field([])

    def superseded_runs(self) -> set[str]:
        """Those that superseded claims need and no others."""
        claimed, current = (
            self._needed({run for claim in claims for run in claim.runs()})
            for claims in (self.claims, [claim for claim in self.claims if not claim.superseded_by])
        )
        return claimed - self._needed(current | (self.runs.keys() - claimed))

    def _needed(self, runs: set[str]) -> set[str]:
        """With what they start from and what they are tuned as."""
        others = {o for name in runs for o in (self.runs[name].start, self.runs[name].tuned_as) if o}
        return runs if others <= runs else self._needed(runs | others)

    @model_validator(mode="before")
    @classmethod
    def _losses_are_of_the_same_tokens(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Every measure gets the finding's longest window."""
        values = copy.deepcopy(values)
        for run in values.get("runs", {}).values():
            for measure in (run or {}).get("measures", []):
                measure["longest"] = values.get("longest")
        return values

    @model_validator(mode="after")
    def _names_exist(self) -> Finding:
        for name, run in self.runs.items():
            asked = max((length for measure in run.measures for length in measure.lengths), default=0)
            if asked > self.longest:
                raise ValueError(f"runs.{name}: {asked:g} L is above longest, {self.longest:g} L; raise that")
            seen, ancestor = {name}, run.start
            while ancestor in self.runs:
                if ancestor in seen:
                    raise ValueError(f"runs.{name}: starts from itself")
                seen.add(ancestor)
                ancestor = self.runs[ancestor].start
            for other in (run.start, run.tuned_as):
                if other and other not in self.runs:
                    raise ValueError(f"runs.{name}: there is no run {other}{nearest(other, self.runs)}")
            if not run.tokens and not run.start:
                raise ValueError(f"runs.{name}: tokens: 0 needs start, the run whose weights are measured")
        for claim in self.claims:
            for operand in claim.operands():
                owner, _, result = operand.partition(".")
                if owner not in self.runs:
                    raise ValueError(f"claim {claim.id}: there is no run {owner}{nearest(owner, self.runs)}")
                known = self.runs[owner].names()
                if result not in known:
                    raise ValueError(f"claim {claim.id}: {owner} gives no {result}{nearest(result, known)}")
            if claim.superseded_by and claim.superseded_by not in {other.id for other in self.claims}:
                raise ValueError(f"claim {claim.id}: superseded_by: there is no claim {claim.superseded_by}")
        for figure in self.figures:
            for other in figure.runs:
                if other not in self.runs:
                    raise ValueError(f"figures: there is no run {other}{nearest(other, self.runs)}")
        if len({claim.id for claim in self.claims}) < len(self.claims):
            raise ValueError("claims: two have the same id")
        return self


def _operands(statistic: Any) -> list[str]:
    if isinstance(statistic, str):
        return [statistic]
    if not isinstance(statistic, dict):
        return []
    if not set(statistic) <= OPERATIONS or len(statistic) != 1:
        raise ValueError(f"statistic {statistic}: expected one of {', '.join(sorted(OPERATIONS))}")
    ((operation, parts),) = statistic.items()
    if operation == "undefined":
        if not isinstance(parts, str):
            raise ValueError(f"undefined: {parts}: expected the name of a result")
        return [parts]
    if not isinstance(parts, list) or not parts or (operation in {"ratio", "difference"} and len(parts) != 2):
        raise ValueError(f"{operation}: {parts}: expected a list, of two for ratio and difference")
    return [name for part in parts for name in _operands(part)]


FINDINGS = sorted(path.stem for path in (CONF / "finding").glob("*.yaml") if path.stem != "all")


def read_finding(name: str) -> Finding:
    """conf/finding/<name>.yaml. Raises UserError for what is wrong with it."""
    values = yaml.safe_load((CONF / "finding" / f"{name}.yaml").read_text())
    return validate(Finding, {"name": name, **values})
