"""From findings to trainings: what has to be run, each once, however many findings ask for it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from model.config import CONF, UserError, validate
from model.findings.code_version import TRAINING, code_version
from model.findings.measure import measure_id
from model.findings.spec import Finding, Measure, RunSpec, Scale
from model.training.config import RunConfig
from model.training.continued import extend
from model.training.run_dir import write_json

# what cannot change a number of the result
_IRRELEVANT: dict[str, Any] = {
    "run_dir": True,
    "resume": True,
    "init_from": True,
    "logger": True,
    "name": True,
    "train": {"on_nonfinite": True, "max_skips": True},
}


@dataclass
class Job:
    """One training, or one reading of its parent's weights, and all that is measured on it."""

    key: str
    name: str
    config: RunConfig
    parent: Job | None
    trains: bool
    measures: list[Measure] = field(default_factory=list)


class Results:
    """results/<scale>/runs/<key>.json: small, and enough to judge without the checkpoints."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder, self.scale = folder, scale

    def file(self, job: Job) -> Path:
        return self.folder / f"{job.key}.json"

    def read(self, job: Job) -> dict[str, Any]:
        """What is known of a job; empty before it has run."""
        try:
            found = json.loads(self.file(job).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, job: Job, **values: Any) -> None:
        write_json(self.file(job), self.read(job) | values)

    def missing(self, job: Job, measures: list[Measure] | None = None) -> list[Measure]:
        """Those of some measures, by default of all that a job has, that no result has yet."""
        known = self.read(job).get("measures", {})
        asked = job.measures if measures is None else measures
        return [measure for measure in asked if measure_id(measure, self.scale) not in known]

    def has_failed(self, job: Job) -> bool:
        """Whether its training, or one that it starts from, diverged: it has no numbers, and will have none."""
        own = self.read(job).get("diverged") is not None
        return own or (job.parent is not None and self.has_failed(job.parent))

    def is_done(self, job: Job, measures: list[Measure] | None = None) -> bool:
        return self.has_failed(job) or (
            bool(self.read(job).get("trained")) and not self.missing(job, measures)
        )


class Plan:
    """The jobs of some findings at a scale. Made anew as results come in, since tuning decides about later jobs.

    Runs that only superseded claims need are left out where they are not on record, unless `superseded`.
    """

    def __init__(
        self, findings: Iterable[Finding], scale: Scale, results: Results, superseded: bool = False
    ) -> None:
        self.scale, self.results = scale, results
        self.jobs: dict[str, Job] = {}
        self.place: dict[tuple[str, str, int], Job] = {}  # (finding, run, seed)
        self.tuning: dict[
            tuple[str, str], list[tuple[list[str], Job]]
        ] = {}  # (finding, run) to (overrides, job)
        self.waiting = 0  # jobs whose configuration is not known yet
        left_out: set[tuple[str, str]] = set()
        for finding in findings:
            former = set() if superseded else finding.superseded_runs()
            for name, run in finding.runs.items():
                jobs = [self._job(finding, name, seed) for seed in scale.seeds]
                if name in former and not all(job and results.is_done(job, run.measures) for job in jobs):
                    left_out.add((finding.name, name))
                    continue
                for seed, job in zip(scale.seeds, jobs, strict=True):
                    if job is None:
                        self.waiting += 1
                        continue
                    self.place[finding.name, name, seed] = job
                    job.measures += [m for m in run.measures if m not in job.measures]
        self.tuning = {place: tried for place, tried in self.tuning.items() if place not in left_out}
        used = {job.key for job in self.place.values()}
        used |= {job.key for tried in self.tuning.values() for _, job in tried}
        self.jobs = {key: job for key, job in self.jobs.items() if key in used}

    def held(self, finding: Finding) -> Finding:
        """The finding without what was left out: runs, their claims, and their lines in figures."""
        runs = {
            name: run
            for name, run in finding.runs.items()
            if (finding.name, name, self.scale.seeds[0]) in self.place
        }
        claims = [claim for claim in finding.claims if claim.runs() <= runs.keys()]
        figures = [
            figure.model_copy(update={"runs": lines})
            for figure in finding.figures
            if (lines := [name for name in figure.runs if name in runs])
        ]
        return finding.model_copy(update={"runs": runs, "claims": claims, "figures": figures})

    def _job(self, finding: Finding, name: str, seed: int) -> Job | None:
        """None while its tuning, or its parent's, is not finished."""
        run = finding.runs[name]
        parent = self._job(finding, run.start, seed) if run.start else None
        if run.start and parent is None:
            return None
        chosen = self._tuned(finding, run.tuned_as or name)
        return None if chosen is None else self._add(run, name, seed, parent, chosen)

    def _tuned(self, finding: Finding, name: str) -> list[str] | None:
        """The overrides that had the lowest validation loss; none where nothing is tuned, None when not known yet."""
        run, seed = finding.runs[name], self.scale.seeds[0]
        if not run.tune:
            return []
        parent = self._job(finding, run.start, seed) if run.start else None
        if run.start and parent is None:
            return None
        if (finding.name, name) not in self.tuning:
            self.tuning[finding.name, name] = [
                (option.split(), self._add(run, f"{name} {option}", seed, parent, option.split()))
                for option in run.tune
            ]
        tried = self.tuning[finding.name, name]
        losses = [self._validation_loss(job) for _, job in tried]
        return None if any(map(math.isnan, losses)) else tried[losses.index(min(losses))][0]

    def _validation_loss(self, job: Job) -> float:
        """Infinite for a training that diverged, NaN for one that is still to be run."""
        known = self.results.read(job)
        return math.inf if "diverged" in known else float(known.get("val_loss", math.nan))

    def _add(self, run: RunSpec, name: str, seed: int, parent: Job | None, chosen: list[str]) -> Job:
        config = configure(run, self.scale, seed, parent, chosen)
        identity = {
            "config": config.model_dump(mode="json", exclude=_IRRELEVANT),
            "parent": parent and parent.key,
            "trains": run.tokens > 0,
            "code": code_version(*TRAINING, str(config.position["_target_"]).rpartition(".")[0]),
        }
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return self.jobs.setdefault(key, Job(key, f"{name}, seed {seed}", config, parent, run.tokens > 0))


def configure(run: RunSpec, scale: Scale, seed: int, parent: Job | None, chosen: list[str]) -> RunConfig:
    """The configuration of one training. Raises UserError as the command line would for the same overrides."""
    length = round(scale.length * run.length)
    batch_tokens = round(scale.batch_tokens * run.batch)
    micro = max(min(scale.micro_tokens or batch_tokens, batch_tokens) // length, 1)
    batch_size = max(batch_tokens // (length * micro), 1) * micro
    steps = max(round(scale.tokens * scale.tokens_of(run) / (batch_size * length)), 1)
    overrides = [
        *([] if parent else scale.overrides),
        *_size(run, scale),
        *run.overrides,
        f"model.context_length={length}",
        f"train.batch_size={batch_size}",
        f"train.micro_batch_size={micro if scale.micro_tokens else 'null'}",
        f"train.steps={steps}",
        f"train.eval_interval={max(steps // run.validations, 1)}",
        f"train.save_interval={max(steps // 5, 50)}",
        "train.keep=1",
        *chosen,
    ]
    values = _composed(tuple(overrides)) | {"seed": seed}
    if parent is None:
        return validate(RunConfig, values)
    keys = [re.split("=", override, maxsplit=1)[0].lstrip("+~") for override in overrides]
    return extend(parent.config, values, keys)


def _size(run: RunSpec, scale: Scale) -> list[str]:
    size = scale.size_of(run)
    if size is None:
        return []
    if size not in scale.sizes:
        raise UserError(
            f"scale.sizes: has no {size}, which a finding asks for; it has {', '.join(scale.sizes)}"
        )
    return scale.sizes[size]


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*overrides, "name=reproduce", "logger.mode=disabled"])
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
