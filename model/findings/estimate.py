"""What findings would take at a scale, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from model.findings.jobs import Job, Plan, Results
from model.findings.spec import Finding, Scale
from model.load import build_model
from model.training.metrics import PEAK_FLOPS

UTILISATION = 0.4  # of the peak, which a model of this kind reaches when its batches fill the device
BYTES_PER_PARAMETER = 16  # weights, gradients and two moments, in fp32
BYTES_PER_LOGIT = 10  # logits and their gradients in fp32, and a bf16 copy
BYTES_PER_ACTIVATION = (
    34  # per token, width and block (Korthikanti et al. 2022, equation 2, without the scores)
)


class Assumed(Results):
    """Results of runs that have not been run, of which the first option of any tuning is the best."""

    def read(self, job: Job) -> dict[str, Any]:
        return {"val_loss": 0.0}


def estimate(findings: list[Finding], scale: Scale, superseded: bool) -> list[dict[str, Any]]:
    """A row for each finding, and one for all, whose trainings are shared. Measures are not counted."""
    groups = {finding.name: [finding] for finding in findings} | {"all of them": findings}
    return [
        _row(name, Plan(group, scale, Assumed(Path(), scale), superseded)) for name, group in groups.items()
    ]


def _row(name: str, plan: Plan) -> dict[str, Any]:
    tokens, flops, memory = 0, 0.0, 0.0
    trainings = [job for job in plan.jobs.values() if job.trains]
    for job in trainings:
        train, shape = job.config.train, job.config.model
        with torch.device("meta"):
            model = build_model(job.config)
        own = train.steps * train.batch_size * shape.context_length
        tokens += own
        flops += own * model.flops_per_token(shape.context_length)
        read_at_once = (train.micro_batch_size or train.batch_size) * shape.context_length
        per_token = BYTES_PER_ACTIVATION * shape.n_embd * shape.n_layer + BYTES_PER_LOGIT * len(
            model.embedding.weight
        )
        memory = max(memory, BYTES_PER_PARAMETER * model.parameter_count() + read_at_once * per_token)
    hours = {f"h on {gpu}": flops / (peak * UTILISATION) / 3600 for gpu, peak in PEAK_FLOPS.items()}
    return {
        "finding": name,
        "trainings": len(trainings),
        "M tokens": tokens / 1e6,
        "GB": memory / 1e9,
    } | hours
