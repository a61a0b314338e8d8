"""Figures of a finding: a line per run, the mean over seeds with its 95 % interval."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import numpy as np

from model.findings.jobs import Plan
from model.findings.judge import interval
from model.findings.measure import measure_id
from model.findings.spec import Figure, Finding

LABELS = {
    "length": ("length of evaluation, in multiples of L", "loss (nats a token)"),
    "tokens": ("tokens of this training (millions)", "loss (nats a token)"),
    "layer": ("layer (0: embeddings)", "distance of the best guess, over L"),
}


def points(finding: Finding, figure: Figure, plan: Plan, line: str, seed: int) -> dict[float, float]:
    """y by x of one line, which is a run or `untrained <run>`, and one seed."""
    run = line.removeprefix("untrained ")
    job = plan.place[finding.name, run, seed]
    known = plan.results.read(job)
    if figure.x == "tokens":
        return {tokens / 1e6: loss for tokens, loss in known.get("curve", [])}
    values: dict[str, float | None] = {}
    for what in finding.runs[run].measures:
        values |= known.get("measures", {}).get(measure_id(what, plan.scale), {})
    if figure.x == "layer":
        pattern = r"untrained@(\d+)" if line.startswith("untrained ") else r"probe@(\d+)"
    else:
        behind = "" if figure.protocol == "non_overlapping" else f"/{figure.protocol}"
        pattern = rf"loss@([\d.]+)L{behind}"
    found = {float(m[1]): y for name, y in values.items() if (m := re.fullmatch(pattern, name))}
    return {x: y for x, y in found.items() if y is not None}


def draw(finding: Finding, figure: Figure, plan: Plan, folder: Path) -> Path:
    """Write the figure as SVG, which has no date or random name in it, and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "ordinal", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    ticks: set[float] = set()
    untrained = [f"untrained {run}" for run in figure.runs] if figure.x == "layer" else []
    for run in figure.runs + untrained:
        by_seed = [points(finding, figure, plan, run, seed) for seed in plan.scale.seeds]
        xs = sorted(set.intersection(*(set(found) for found in by_seed)))
        if not xs:  # a training that diverged has no line
            continue
        ticks |= set(xs)
        columns = [[found[x] for found in by_seed] for x in xs]
        means = [fmean(column) for column in columns]
        bounds = [interval(column) or (fmean(column), fmean(column)) for column in columns]
        (line,) = axes.plot(xs, means, marker="o", ms=3, label=run)
        axes.fill_between(
            xs, [low for low, _ in bounds], [high for _, high in bounds], alpha=0.2, color=line.get_color()
        )
    axes.set(xlabel=LABELS[figure.x][0], ylabel=LABELS[figure.x][1], title=figure.title)
    if figure.x == "length":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.minorticks_off()
    if figure.x != "tokens":
        axes.set_xticks(sorted(ticks))
    axes.grid(alpha=0.3)
    # in the order of the lines' ends, and beside them
    lines = sorted(axes.lines, key=lambda line: -np.asarray(line.get_ydata())[-1])
    seeds = len(plan.scale.seeds)
    band = f"mean and 95 %\ninterval of {seeds} seeds" if seeds > 1 else "one seed"
    canvas.legend(handles=lines, title=band, loc="outside right upper", frameon=False, fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", f"{finding.name} {figure.title}".lower()).strip("-")
    canvas.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(canvas)
    return folder / f"{name}.svg"
