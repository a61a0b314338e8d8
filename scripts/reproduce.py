"""Re-run published findings about position and judge their claims: `python scripts/reproduce.py finding=alibi`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from model import launch
from model.config import Strict, UserError, to_path, validate
from model.findings.spec import FINDINGS, Finding, Scale, read_finding

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for workers, which import train.py


class ReproduceConfig(Strict):
    finding: dict[str, Any]
    scale: Scale
    workers: PositiveInt | None
    estimate: bool
    superseded: bool
    out: str
    work: str


def main(values: dict[str, Any]) -> None:
    """Run what is missing, judge the claims, write the pages."""
    config = validate(ReproduceConfig, values)
    chosen, scale_name, scale = launch.choice("finding"), launch.choice("scale"), config.scale
    changed = [key for key in launch.overridden() if key.startswith(("scale.", "finding."))]
    if changed and "out" not in launch.overridden():
        raise UserError(
            f"{changed[0]}: other numbers than {scale_name}'s need a folder of their own; give out=<folder>"
        )
    if chosen == "all":
        findings = [read_finding(name) for name in FINDINGS]
    else:
        findings = [validate(Finding, {"name": chosen, **config.finding}, prefix="finding.")]
    # torch, once the configuration is known to be right
    if config.estimate:
        from model.findings.estimate import UTILISATION, estimate

        print(f"Hours if {UTILISATION:.0%} of a device's peak are reached; measures are not counted.")
        launch.print_table(estimate(findings, scale, config.superseded), title=scale.title)
        return
    from model.findings.jobs import Plan, Results
    from model.findings.page import publish, update_readme
    from model.findings.pool import gpus_for, run_all
    from model.findings.texts import prepare_texts

    folder, work = to_path(config.out) / scale_name, to_path(config.work) / scale_name
    results = Results(folder / "runs", scale)
    plan = Plan(findings, scale, results, config.superseded)
    prepare_texts(findings, plan)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = gpus_for(plan)
    workers = min(config.workers or len(gpus) or cores, cores)
    print(f"{len(plan.jobs)} runs or more, {workers} at a time; results go to {folder}")
    plan = run_all(
        lambda: Plan(findings, scale, results, config.superseded), work, workers, cores // workers, gpus
    )
    for finding in findings:
        command = f"python scripts/reproduce.py finding={finding.name} scale={scale_name}"
        command += " superseded=true" if config.superseded else ""
        claims = publish(finding, plan, folder, command)
        rows = [
            {
                "claim": c["id"],
                "asked": c["threshold"],
                "mean": c["mean"],
                "interval": shown(c["interval"]),
                "verdict": c["verdict"],
            }
            for c in claims
            if not c["superseded_by"]
        ]
        launch.print_table(rows, title=f"{finding.title}: {folder / finding.name}.md")
    if folder.resolve().is_relative_to(ROOT / "results"):
        update_readme(ROOT / "README.md", ROOT / "results")


def shown(interval: tuple[float, float] | None) -> str:
    return f"[{interval[0]:.4f}, {interval[1]:.4f}]" if interval else "-"


if __name__ == "__main__":
    launch.main("reproduce", main)
