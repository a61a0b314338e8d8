"""What a finding came to, for people and for programs: its page, its JSON, and the table of the README."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from data.files import write_atomically
from model.errors import UserError
from model.findings.figures import draw
from model.findings.jobs import Job, Plan
from model.findings.judge import NOT_JUDGED, VERDICTS, Verdict, judge
from model.findings.spec import FINDINGS, Finding
from model.findings.tables import loss_tables, meanings, runs_table, tuning, tuning_tables
from model.training.run_dir import write_json

LOSSES = "Nats a token, mean over seeds ± half of its 95 % interval. Each table scores one set of tokens."
SUPERSEDED = "A later claim asks the same better, or of a longer training. These are kept and not counted."
LEFT_OUT = "Superseded, and not run here: {}. With `superseded=true` they are."
BEGIN, END = "<!-- findings: begin -->", "<!-- findings: end -->"


def publish(finding: Finding, plan: Plan, folder: Path, command: str) -> list[dict[str, Any]]:
    """Write <finding>.json, .md and figures into `folder`; returns the claims as the JSON has them."""
    every, finding = {claim.id for claim in finding.claims}, plan.held(finding)
    claims = [plain(verdict) for verdict in judge(finding, plan)]
    used = {job.key: job for (name, _, _), job in plan.place.items() if name == finding.name}
    used |= {
        job.key: job for (name, _), tried in plan.tuning.items() if name == finding.name for _, job in tried
    }
    figures = [draw(finding, figure, plan, folder / "figures") for figure in finding.figures]
    content = {
        "finding": finding.name,
        "title": finding.title,
        "paper": finding.paper,
        "command": command,
        "claims": claims,
        "left_out": sorted(every - {claim["id"] for claim in claims}),
        "tuning": tuning(finding, plan),
        "cost": cost(list(used.values()), plan),
        "runs": sorted(used),
    }
    write_json(folder / f"{finding.name}.json", content)
    text = page(finding, plan, content, [path.relative_to(folder) for path in figures])
    write_atomically(folder / f"{finding.name}.md", text.encode())
    return claims


def plain(verdict: Verdict) -> dict[str, Any]:
    """For JSON, which has no NaN: null where a run has no number."""
    values = [value if math.isfinite(value) else None for value in verdict.values]
    return verdict._asdict() | {
        "values": values,
        "mean": verdict.mean if math.isfinite(verdict.mean) else None,
    }


def page(finding: Finding, plan: Plan, content: dict[str, Any], figures: list[Path]) -> str:
    """The page in Markdown."""
    lines = [f"# {finding.title}", "", f"{finding.paper}. Scale: {plan.scale.title}.", ""]
    if plan.scale.note:
        lines += [plan.scale.note.strip(), ""]
    lines += claims_table([claim for claim in content["claims"] if not claim["superseded_by"]])
    seeds = ", ".join(map(str, plan.scale.seeds))
    lines += [
        "",
        f"Of {len(content['claims'])} claims {counted(content['claims'])}. Means over seeds {seeds} with 95 % "
        "intervals (Student's t), each statistic taken within a seed. A claim is *reproduced* when its whole interval "
        "is as asked, *not reproduced* when all of it is not, else *inconclusive*. The interval is about the seed of a "
        "training; texts and exams are the same for all.",
        "",
    ]
    lines += [f"![{figure.stem}]({figure.as_posix()})\n" for figure in figures]
    lines += ["## Loss by length", "", LOSSES, "", *losses] if (losses := loss_tables(finding, plan)) else []
    if finding.discussion:
        lines += ["## What the verdicts rest on", "", finding.discussion.strip(), ""]
    if superseded := [claim for claim in content["claims"] if claim["superseded_by"]]:
        lines += ["## Superseded claims", "", SUPERSEDED, "", *claims_table(superseded), ""]
    if content["left_out"]:
        lines += [LEFT_OUT.format(", ".join(content["left_out"])), ""]
    lines += ["## What the names mean", "", *meanings(finding), "", *runs_table(finding, plan.scale), ""]
    lines += ["## Why these thresholds", ""]
    lines += [f"- {claim['id']}: {claim['why'].strip()}" for claim in content["claims"]]
    lines += ["", "## What differs from the paper", "", finding.differs.strip(), ""]
    if content["tuning"]:
        lines += ["## Tuning", "", *tuning_tables(content["tuning"]), ""]
    spent = content["cost"]
    lines += [
        "## Cost",
        "",
        f"{spent['trainings']} trainings, {spent['tokens'] / 1e6:.1f} M tokens, about {spent['core_hours']:.1f} core "
        f"hours of training on {spent['machines']}. Trainings that findings share are counted in each.",
        "",
        f"    {content['command']}",
        "",
    ]
    return "\n".join(lines)


def claims_table(claims: list[dict[str, Any]]) -> list[str]:
    lines = ["| claim | statistic | asked | measured | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        scale = "; said to need scale" if claim["needs_scale"] else ""
        successor = f"; see {claim['superseded_by']}" if claim["superseded_by"] else ""
        cells = [
            f"**{claim['id']}** {claim['sentence']} ({claim['source']})",
            f"`{claim['statistic']}`",
            claim["threshold"],
            measured(claim),
            f"**{claim['verdict']}**{scale}{successor}",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def measured(claim: dict[str, Any]) -> str:
    if claim["mean"] is None:
        return "no number, for a run diverged"
    bounds = claim["interval"]
    return f"{claim['mean']:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def counted(claims: list[dict[str, Any]]) -> str:
    """How many have each verdict: `3 reproduced, 1 not judged`. Superseded ones are counted as such alone."""
    counts = Counter("superseded" if claim["superseded_by"] else claim["verdict"] for claim in claims)
    verdicts = (*VERDICTS, "superseded", NOT_JUDGED)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts if counts[verdict])


def cost(jobs: list[Job], plan: Plan) -> dict[str, Any]:
    """What the trainings took: their tokens, and these over the median speed of each, times its threads."""
    results = [known for job in jobs if "tokens" in (known := plan.results.read(job))]
    hours = [r["tokens"] / r["tokens_per_s"] * r["threads"] / 3600 for r in results]
    machines = sorted({f"{r['environment']['machine']}, torch {r['environment']['torch']}" for r in results})
    return {
        "trainings": len(results),
        "tokens": sum(r["tokens"] for r in results),
        "core_hours": sum(hours),
        "machines": "; ".join(machines),
    }


def findings_table(results: Path) -> str:
    """The README's part, from the JSON of all scales whose verdicts count: how many held, then each current claim."""
    summary = [
        "| finding | scale | " + " | ".join(VERDICTS) + " |",
        "| --- | --- |" + " --- |" * len(VERDICTS),
    ]
    details = []
    for name in FINDINGS:
        for file in sorted(results.glob(f"*/{name}.json")):
            content, scale = json.loads(file.read_text()), file.parent.name
            claims = content["claims"]
            if all(claim["verdict"] == NOT_JUDGED for claim in claims):
                continue
            current = [claim for claim in claims if not claim["superseded_by"]]
            counts = Counter(claim["verdict"] for claim in current)
            link = f"[{content['title']}](results/{scale}/{name}.md)"
            cells = [link, scale, *(str(counts[verdict]) for verdict in VERDICTS)]
            summary.append("| " + " | ".join(cells) + " |")
            head = f"<details><summary>{content['title']}, {scale}: {counted(claims)}</summary>"
            details += ["", head, "", "| claim | measured | asked | verdict |", "| --- | --- | --- | --- |"]
            for claim in current:
                cells = [f"{claim['id']} {claim['sentence']}", measured(claim), claim["threshold"]]
                details.append("| " + " | ".join([*cells, f"**{claim['verdict']}**"]) + " |")
            details += ["", "</details>"]
    return "\n".join(summary + details) if details else "No finding has been judged yet."


def update_readme(readme: Path, results: Path) -> None:
    """Put the tables between its marks."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme}: has no lines {BEGIN} and {END}, between which the table of findings goes")
    table = f"{BEGIN}\n{findings_table(results)}\n{END}"
    write_atomically(readme, re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL).encode())
