"""Draw the curves of runs: `python scripts/plot.py run=[runs/<a>,runs/<b>] metric=val/loss`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model import launch
from model.config import Strict, UserError, to_path, validate
from model.training.run_dir import metrics_rows


class PlotConfig(Strict):
    run: str | list[str]
    metric: str
    out: str


def curve(run: Path, metric: str) -> tuple[list[float], list[float]]:
    """(tokens, values) of one metric. Raises UserError when the run has no such metric."""
    lines = metrics_rows(run)
    points = [(line["tokens"], line[metric]) for line in lines if metric in line]
    if not points:
        known = sorted({key for line in lines for key in line})
        raise UserError(f"metric={metric}: not in {run}/metrics.jsonl; it has {', '.join(known)}")
    return [x for x, _ in points], [y for _, y in points]


def main(values: dict[str, Any]) -> None:
    config = validate(PlotConfig, values)
    runs = [to_path(run) for run in ([config.run] if isinstance(config.run, str) else config.run)]
    names = [run.name if [r.name for r in runs].count(run.name) == 1 else str(run) for run in runs]
    curves = {name: curve(run, config.metric) for name, run in zip(names, runs, strict=True)}

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, (tokens, points) in curves.items():
        axes.plot([t / 1e6 for t in tokens], points, label=name, linewidth=1.5)
    axes.set(xlabel="training tokens (millions)", ylabel=config.metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(to_path(config.out), dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"out={config.out}: cannot be written ({error})") from None
    print(f"Wrote {config.out}")


if __name__ == "__main__":
    launch.main("plot", main)
