"""From results to verdicts: the statistic of each claim by seed, its 95 % interval, and where that lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

from model.findings.jobs import Plan
from model.findings.measure import measure_id
from model.findings.spec import Claim, Finding

FEWEST_SEEDS = 3
VERDICTS, NOT_JUDGED = ("reproduced", "not reproduced", "inconclusive"), "not judged"

Lookup = Callable[[str], float | None]  # "run.result" to its value; None: not defined


class Verdict(NamedTuple):
    id: str
    sentence: str
    source: str
    statistic: str
    threshold: str
    why: str
    seeds: list[int]
    values: list[float]
    mean: float
    interval: tuple[float, float] | None
    verdict: str
    needs_scale: bool
    superseded_by: str | None


def judge(finding: Finding, plan: Plan) -> list[Verdict]:
    """A verdict for each claim over the seeds of the scale."""
    seeds = plan.scale.seeds
    verdicts = []
    for claim in finding.claims:
        values = [value(claim.statistic, lookup(finding, plan, seed)) for seed in seeds]
        bounds = interval(values)
        verdicts.append(
            Verdict(
                id=claim.id,
                sentence=claim.sentence,
                source=claim.source,
                statistic=text(claim.statistic),
                threshold=threshold(claim),
                why=claim.why,
                seeds=seeds,
                values=values,
                mean=fmean(values),
                interval=bounds,
                verdict=decide(claim, bounds, len(values)) if plan.scale.judged else NOT_JUDGED,
                needs_scale=claim.needs_scale,
                superseded_by=claim.superseded_by,
            )
        )
    return verdicts


def decide(claim: Claim, bounds: tuple[float, float] | None, n: int) -> str:
    """`reproduced` when the whole interval is within the bounds, `not reproduced` when it is wholly without."""
    if bounds is None or n < FEWEST_SEEDS:
        return NOT_JUDGED
    low, high = bounds
    if claim.above < low and high < claim.below:
        return "reproduced"
    return "not reproduced" if high <= claim.above or low >= claim.below else "inconclusive"


def interval(values: list[float]) -> tuple[float, float] | None:
    """The 95 % interval of Student's t for the mean; None for fewer than two values."""
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return None
    half = float(student.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)
    return fmean(values) - half, fmean(values) + half


def value(statistic: Any, look_up: Lookup) -> float:
    """A number, a result by its name, or one of ratio, difference, max, min, mean and undefined of such."""
    if isinstance(statistic, int | float):
        return float(statistic)
    if isinstance(statistic, str):
        found = look_up(statistic)
        return math.nan if found is None else found
    ((operation, operands),) = statistic.items()
    if operation == "undefined":
        failed = look_up(f"{operands.partition('.')[0]}.failed")  # and has no result for that reason
        return math.nan if failed else float(look_up(operands) is None)
    values = [value(operand, look_up) for operand in operands]
    # max and min would pass over what is not a number
    return math.nan if any(map(math.isnan, values)) else OPERATIONS[operation](values)


OPERATIONS: dict[str, Callable[[list[float]], float]] = {
    "ratio": lambda ab: ab[0] / ab[1],
    "difference": lambda ab: ab[0] - ab[1],
    "max": max,
    "min": min,
    "mean": fmean,
}

SIGNS = {"ratio": " / ", "difference": " - "}


def text(statistic: Any) -> str:
    """The statistic as people write it."""
    if not isinstance(statistic, dict):
        return str(statistic)
    ((operation, operands),) = statistic.items()
    if operation == "undefined":
        return f"undefined({operands})"
    parts = [text(operand) for operand in operands]
    if operation not in SIGNS:
        return f"{operation}({', '.join(parts)})"
    nested = [isinstance(operand, dict) and not SIGNS.keys().isdisjoint(operand) for operand in operands]
    return SIGNS[operation].join(
        f"({part})" if inside else part for part, inside in zip(parts, nested, strict=True)
    )


def threshold(claim: Claim) -> str:
    parts = [
        f"> {claim.above:g}" if claim.above > -math.inf else "",
        f"< {claim.below:g}" if claim.below < math.inf else "",
    ]
    return " and ".join(part for part in parts if part)


def lookup(finding: Finding, plan: Plan, seed: int) -> Lookup:
    """Results of `finding`'s runs with one seed by `run.result`."""

    def look_up(name: str) -> float | None:
        run, _, result = name.partition(".")
        job = plan.place[finding.name, run, seed]
        known = plan.results.read(job)
        values = {key: known.get(key) for key in ("val_loss", "tokens_per_s", "tokens")}
        values["failed"] = float(plan.results.has_failed(job))
        for what in finding.runs[run].measures:
            values |= known.get("measures", {}).get(measure_id(what, plan.scale), {})
        return values.get(result)

    return look_up
