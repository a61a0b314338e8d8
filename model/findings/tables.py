"""What a finding ran and measured, beside its claims: what words mean, runs, losses by length, tuning."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from model.findings.jobs import Plan
from model.findings.judge import interval, lookup
from model.findings.spec import Finding, RunSpec, Scale

MEANING = {
    "loss": "`loss@2L` is the loss in nats a token of windows of 2 L, `ppl@2L` its exponential, `bits@2L` the same in "
    "bits per byte, and `beyond@2L` the loss of tokens whose place in the window is L or more. Windows lie back to "
    "back, and every length scores the same tokens; `/last` are only those in the last L/4 places of a window (and "
    "with the finding's longest window before them), which have nearly a whole window as context.",
    "retrieval": "`retrieves_to@4L` is the length, over L, up to which at least 20 % of keys are found everywhere, of "
    "lengths up to 4 L, and `found@4L` the part found in all of them.",
    "probe": "`probe_best` is how far the guesses of a classifier of positions are off, in the mean and over L, at the "
    "best layer; `probe_last` and `probe_embeddings` are those of one layer, `untrained_best` that of the same model "
    "before its training.",
    "shuffle": "`rise@keep_8` is what it costs, in nats for the next token, to permute its prefix but for the last 8.",
    "bigram": "`bigram_loss` is the loss of a smoothed bigram model on the text of `val_loss`.",
    "bound": "`bound_ratio` is the bound of RoPE's scores beyond the window over that of interpolated ones.",
    "scores": "`score_within@4L` and `score_beyond@4L` are the largest |q k| / sqrt(d) in windows of 4 L at distances "
    "below L and from L.",
    "memory": "`saved_mb` is what a step of training keeps for its backward pass, in MB.",
    "speed": "`token_cost` is the time that a step takes for a token over that of sinusoidal positions at L, in turn.",
    "exact": "`exact_within` is the part of words answered without a mistake, over words as long as those of training, "
    "and `exact_beyond` that over longer ones, up to twice that.",
}


def meanings(finding: Finding) -> list[str]:
    """A line for each kind of result that the finding has."""
    kinds = {measure.kind for run in finding.runs.values() for measure in run.measures}
    common = "`val_loss` is the validation loss at the end, in windows of the run's own length."
    return [f"- {common}", *(f"- {text}" for kind, text in MEANING.items() if kind in kinds)]


def runs_table(finding: Finding, scale: Scale) -> list[str]:
    """A line per run: what it is, as overrides, and how it differs from a whole training at L."""
    lines = ["| run | overrides | window | tokens | learning rate |", "| --- | --- | --- | --- | --- |"]
    for name, run in finding.runs.items():
        size = f", size `{smaller}`" if (smaller := scale.size_of(run)) else ""
        rate = f"as {run.tuned_as}" if run.tuned_as else "its own best" if run.tune else "default"
        cells = [name, f"`{' '.join(run.overrides)}`{size}", f"{run.length:g} L", _tokens(run, scale)]
        lines.append("| " + " | ".join([*cells, rate if run.tokens else "-"]) + " |")
    return lines


def _tokens(run: RunSpec, scale: Scale) -> str:
    if not run.tokens:
        return f"none: {run.start} read otherwise"
    share = f" ({run.tokens:.0%} of a longer training)" if run.longer and run.start else ""
    return f"{scale.tokens_of(run):.0%}{share}" + (f", from {run.start}" if run.start else "")


def loss_tables(finding: Finding, plan: Plan) -> list[str]:
    """Loss by length for each protocol, a line per run: mean and half of the 95 % interval."""
    lines: list[str] = []
    for protocol in ("non_overlapping", "sliding", "last"):
        lengths = {
            name: {
                m
                for what in run.measures
                if (what.kind, what.protocol) == ("loss", protocol)
                for m in what.lengths
            }
            for name, run in finding.runs.items()
        }
        columns = sorted(set().union(*lengths.values()))
        if columns:
            behind = "" if protocol == "non_overlapping" else f"/{protocol}"
            head = " | ".join(f"{multiple:g} L{behind}" for multiple in columns)
            lines += [f"| run | {head} |", "| --- |" + " --- |" * len(columns)]
            for name in finding.runs:
                if lengths[name]:
                    cells = [
                        _loss(finding, plan, name, f"loss@{multiple:g}L{behind}")
                        if multiple in lengths[name]
                        else ""
                        for multiple in columns
                    ]
                    lines.append(f"| {name} | " + " | ".join(cells) + " |")
            lines.append("")
    return lines


def _loss(finding: Finding, plan: Plan, run: str, result: str) -> str:
    look_ups = [lookup(finding, plan, seed) for seed in plan.scale.seeds]
    if any(look_up(f"{run}.failed") for look_up in look_ups):
        return "diverged"
    found = [look_up(f"{run}.{result}") for look_up in look_ups]
    values = [value for value in found if value is not None]
    if len(values) < len(found):
        return "not defined"
    bounds = interval(values)
    return f"{fmean(values):.3f}" + (f" ± {(bounds[1] - bounds[0]) / 2:.3f}" if bounds else "")


def tuning(finding: Finding, plan: Plan) -> list[dict[str, Any]]:
    """A row for each option that was tried; `tokens` are those validated on, None for the whole split."""
    return [
        {
            "run": run,
            "option": " ".join(options),
            "tokens": job.config.train.eval_tokens,
            "val_loss": plan.results.read(job).get("val_loss"),
        }
        for (name, run), tried in plan.tuning.items()
        if name == finding.name
        for options, job in tried
    ]


def tuning_tables(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each set of options, a line per run; the lowest loss is bold."""
    tried: dict[tuple[str, int | None], dict[str, float | None]] = {}
    for row in rows:
        tried.setdefault((row["run"], row["tokens"]), {})[row["option"]] = row["val_loss"]
    lines = ["Validation loss by option, first seed; the lowest is used for all seeds."]
    at_an_end = []
    for options, tokens in dict.fromkeys((tuple(losses), tokens) for (_, tokens), losses in tried.items()):
        cells = "".join(f" `{option}` |" for option in options)
        head = "run" if tokens is None else f"run, on the first {tokens:,} tokens"
        lines += ["", f"| {head} |{cells}", "| --- |" + " --- |" * len(options)]
        for (run, own), losses in tried.items():
            if (tuple(losses), own) == (options, tokens):
                found = [math.inf if loss is None else loss for loss in losses.values()]
                best = found.index(min(found))
                texts = ["diverged" if math.isinf(loss) else f"{loss:.4f}" for loss in found]
                texts[best] = f"**{texts[best]}**"
                lines.append(f"| {run} | " + " | ".join(texts) + " |")
                at_an_end += [run] if best in {0, len(found) - 1} else []
    if at_an_end:
        ends = (
            f"Best at an end of what was tried: {', '.join(at_an_end)}. A wider search may find a better one."
        )
        lines += ["", ends]
    return lines
