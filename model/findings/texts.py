"""The texts that findings are about: prepared, and long enough, before anything is trained on them."""

from __future__ import annotations

from pathlib import Path

from data import tokenizer
from data.loader import TokenStream
from data.prepare import prepare
from model.config import UserError
from model.findings.jobs import Job, Plan
from model.findings.spec import Finding


def prepare_texts(findings: list[Finding], plan: Plan) -> None:
    """Shards for every job. Raises UserError where a finding asks for longer documents than a text holds out."""
    folders: dict[tuple[str, str], Path] = {}
    for job in plan.jobs.values():
        if _text(job) not in folders:
            folders[_text(job)] = prepare(job.config.data, job.config.tokenizer.name)
    for finding in findings:
        scored = [name for name, run in finding.runs.items() if any(m.kind == "loss" for m in run.measures)]
        texts = {_text(job) for name in scored for job in _known(finding, name, plan)}
        for text in sorted(texts):
            _check(finding, folders[text], text[1], round(plan.scale.length * finding.longest))


def _check(finding: Finding, folder: Path, tokenizer_name: str, longest: int) -> None:
    _, sizes = TokenStream(folder, "val").documents(tokenizer.vocab_size(tokenizer_name) - 1)
    if sizes.max() <= longest:
        raise UserError(
            f"finding={finding.name}: scores windows of {longest:,} tokens, and no held-out document of {folder} is "
            f"longer than {sizes.max():,}; take a text with longer ones, or a scale with a smaller length"
        )


def _text(job: Job) -> tuple[str, str]:
    return job.config.data.source, job.config.tokenizer.name


def _known(finding: Finding, run: str, plan: Plan) -> list[Job]:
    """Jobs of a run, or of the one that it starts from, as far as they are known before its tuning."""
    while start := finding.runs[run].start:
        run = start
    jobs = [job for _, job in plan.tuning.get((finding.name, run), [])]
    return jobs or [job for place, job in plan.place.items() if place[:2] == (finding.name, run)]
