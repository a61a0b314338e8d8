"""A run's loss over window lengths, kept in evaluation/<name>.json as it grows, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from data import tokenizer
from data.loader import TokenStream
from model.config import UserError
from model.evaluation.kept import Kept, Row
from model.evaluation.perplexity import score
from model.evaluation.windows import Protocol, choose_documents, document_windows
from model.load import Run


class Plan(NamedTuple):
    """What is asked of every run. `note` goes into each row, and tells rows of one file apart."""

    lengths: list[int]
    protocols: list[Protocol]
    stride: int
    max_tokens: int | None
    note: Row
    longest: int | None = None  # the longest window of a larger comparison, if this is a part of one


def sweep(
    run: Run,
    stream: TokenStream,
    plan: Plan,
    kept: Kept,
    *,
    batch_tokens: int,
    autocast: Callable[[], torch.autocast],
    on_batch: Callable[[int, int], None] | None = None,
) -> Iterator[Row]:
    """A row per protocol and length; one that `kept` has with the same settings is given back as it is.

    A length that the encoding does not define, or for which no document is long enough, has a row with a
    `skipped` sentence, and the sweep goes on. Raises UserError for a run of masked tokens.
    """
    if run.config.objective == "mlm":
        raise UserError(
            "a run of objective=mlm has no loss of next tokens; its loss of masked ones is val/loss in metrics.jsonl"
        )
    starts, sizes = stream.documents(tokenizer.vocab_size(run.config.tokenizer.name) - 1)
    trained, limit = run.config.model.context_length, run.model.position.max_length
    defined = [length for length in plan.lengths if limit is None or length <= limit]
    possible = [length for length in plan.lengths if (sizes > length).any()]
    # short documents have nothing to say about long windows; within the trained length all of them count
    most = plan.longest or max(possible, default=0)
    longest = most if most > trained else 1
    for protocol in plan.protocols:
        needed = most if protocol == "last" else longest
        chosen = choose_documents(starts, sizes, protocol, needed, plan.max_tokens)
        for length in plan.lengths:
            settings = {
                "length": length,
                "protocol": protocol,
                "stride": None if protocol == "non_overlapping" else min(plan.stride, length),
                "trained": trained,
                "longest": needed,
                **plan.note,
            }
            if length not in defined:
                yield settings | {"skipped": f"not defined beyond {limit}"}
            elif length not in possible:
                yield settings | {
                    "skipped": f"no document of more than {length} tokens ({sizes.max()} at most)"
                }
            elif known := kept.find(settings):
                yield known
            else:
                windows = document_windows(*chosen, protocol, length, min(plan.stride, length), needed)
                found = score(
                    run.model,
                    stream,
                    windows,
                    edge=trained,
                    batch_tokens=batch_tokens,
                    autocast=autocast,
                    on_batch=on_batch,
                )
                yield kept.add(settings | found.as_dict())


def metrics(rows: list[Row]) -> dict[str, float]:
    """The losses by the names that W&B shows: `val/loss_at/2048`, with protocol and scaling where not the usual."""
    named = {}
    for row in rows:
        if "loss" in row:
            _, *changes = row["run"].split(" +")
            unusual = [] if row["protocol"] == "non_overlapping" else [row["protocol"]]
            named["/".join([f"{row['split']}/loss_at/{row['length']}", *unusual, *changes])] = row["loss"]
    return named


def draw(rows: list[Row], file: Path) -> None:
    """Loss against length, and against position in the longest window, a line per run and protocol."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if "loss" in row:
            lines.setdefault(f"{row['run']}, {row['protocol']}", []).append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row["length"])
        errors = [row["standard_error"] or 0 for row in points]
        left.errorbar(
            [row["length"] for row in points], [row["loss"] for row in points], yerr=errors, marker="o", ms=3
        )
        buckets = points[-1]["by_position"]
        right.plot([b["to"] for b in buckets], [b["loss"] for b in buckets], marker="o", ms=3, label=name)
    for axes, label in ((left, "window length in tokens"), (right, "place in the longest window, up to")):
        axes.set(xscale="log", xlabel=label)
        axes.grid(alpha=0.3)
        for trained in {row["trained"] for row in rows}:
            axes.axvline(trained, color="grey", linestyle=":", linewidth=1)
    left.set(ylabel="loss (nats a token); dotted: trained length")
    right.legend(frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)
