"""What is measured on a finished run, by the names that claims use."""

from __future__ import annotations

from pathlib import Path

from data.loader import TokenStream
from model.evaluation import lengths as loss_at
from model.evaluation import retrieval
from model.evaluation.kept import Kept
from model.findings.spec import Measure, Scale
from model.load import Run
from model.training.device import autocast

BATCH_TOKENS, PRECISION = 16384, "fp32"
Values = dict[str, float | None]  # None: not defined


def measure(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    """Results by name; `folder` keeps what is done of a measure that is stopped. Lengths are in units of L:

    loss: `loss@2L` and `ppl@2L`, with `/sliding` or `/last` behind for those protocols, `beyond@2L` for the
    tokens whose place in the window is L or more, and `bits@2L` per byte. retrieval: `retrieves_to@4L`, as a
    multiple of L, and `found@4L`, the fraction of keys found within it.
    """
    return {"loss": _losses, "retrieval": _retrieval}[what.kind](run, stream, what, scale, folder)


def _losses(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    tokens = {round(scale.length * multiple): multiple for multiple in what.lengths}
    plan = loss_at.Plan(
        sorted(tokens), [what.protocol], scale.length // 4, scale.val_tokens, {"L": scale.length}
    )
    kept = Kept(folder / "losses.json")
    device = next(run.model.parameters()).device
    values: Values = {}
    for row in loss_at.sweep(
        run, stream, plan, kept, batch_tokens=BATCH_TOKENS, autocast=autocast(device, PRECISION)
    ):
        at = f"@{tokens[row['length']]:g}L" + (
            "" if what.protocol == "non_overlapping" else f"/{what.protocol}"
        )
        for name, key in (("loss", "loss"), ("ppl", "perplexity"), ("bits", "bits_per_byte")):
            values[name + at] = row.get(key)
        far = [bucket for bucket in row.get("by_position", []) if bucket["from"] >= scale.length]
        if far:
            n = sum(bucket["tokens"] for bucket in far)
            values["beyond" + at] = sum(bucket["loss"] * bucket["tokens"] for bucket in far) / n
    return values


def _retrieval(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    values: Values = {}
    device = next(run.model.parameters()).device
    for multiple in what.lengths:
        rows = list(
            retrieval.sweep(
                run,
                stream,
                retrieval.evenly_spaced(round(scale.length * multiple)),
                {"run": "", "trained": scale.length},
                Kept(folder / "retrieval.json"),
                BATCH_TOKENS,
                autocast(device, PRECISION),
            )
        )
        found = [row["found"] for row in rows if "found" in row]
        values[f"retrieves_to@{multiple:g}L"] = retrieval.effective_length(rows) / scale.length
        values[f"found@{multiple:g}L"] = sum(found) / len(found) if found else None
    return values
