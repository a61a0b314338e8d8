"""How far back a model finds a key's value: Chen et al. 2023 (arXiv 2306.15595), section 3.3, with `data/recall.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from data.loader import TokenStream
from data.recall import CHANCE, SHORTEST_EXAM, Recall
from model.config import UserError
from model.evaluation.kept import Kept, Row
from model.gpt import GPT
from model.load import Run

TRIALS = 32  # exams a length
LENGTHS = 32  # evenly spaced, where none but the longest is asked for
ENOUGH = 0.2  # of the keys, for a length to count as seen


def evenly_spaced(longest: int) -> list[int]:
    """Up to `LENGTHS` lengths that end with `longest`. Raises UserError when no exam is that short."""
    if longest < SHORTEST_EXAM:
        raise UserError(f"lengths: retrieval needs {SHORTEST_EXAM} tokens or more")
    lengths = {longest * (i + 1) // LENGTHS for i in range(LENGTHS)}
    return sorted(length for length in lengths if length >= SHORTEST_EXAM)


@torch.no_grad()
def retrieve(
    model: GPT, stream: TokenStream, tokenizer_name: str, length: int, batch_tokens: int = 16384
) -> Row:
    """`TRIALS` exams of `length` tokens over text of `stream`: the fraction of values that come out on top.

    The exams are the same for every model with this tokenizer and text; no seed of a training plays a part.
    """
    recall = Recall(tokenizer_name)
    device = next(model.parameters()).device
    generator = np.random.Generator(np.random.Philox(key=[length, TRIALS]))
    windows, answers = [], []
    for start in generator.integers(len(stream) - length + 1, size=TRIALS):
        window_T, answer = recall.exam(stream.read(int(start), length), generator)
        windows.append(window_T)
        answers.append(answer)
    windows_WT, answers_W = torch.from_numpy(np.stack(windows)), torch.tensor(answers)
    found = 0
    for rows in torch.arange(TRIALS).split(max(batch_tokens // length, 1)):
        hidden_BTC = model.hidden(windows_WT[rows].to(device))
        guess_B = model.head(hidden_BTC[:, -1:]).float().argmax(-1)[:, 0].cpu()
        found += int((guess_B == answers_W[rows]).sum())
    return {"found": found / TRIALS, "chance": CHANCE}


def sweep(
    run: Run,
    stream: TokenStream,
    lengths: list[int],
    note: Row,
    kept: Kept,
    batch_tokens: int,
    autocast: Callable[[], torch.autocast],
) -> Iterator[Row]:
    """A row per length; one that `kept` has is given back as it is. The last row says why longer ones are left out."""
    limit = run.model.position.max_length
    for length in lengths:
        settings = {"length": length, "trials": TRIALS, **note}
        if limit is not None and length > limit:
            yield settings | {"skipped": f"not defined beyond {limit}"}
            return
        if length > len(stream):
            yield settings | {"skipped": f"the {stream.split} split has {len(stream)} tokens"}
            return
        if known := kept.find(settings):
            yield known
            continue
        with autocast():
            found = retrieve(run.model, stream, run.config.tokenizer.name, length, batch_tokens)
        yield kept.add(settings | found)


def effective_length(rows: list[Row]) -> int:
    """The largest length such that at it, and at every smaller one tried, `ENOUGH` of the keys are found; 0 if none."""
    reached = 0
    for row in sorted(rows, key=lambda row: row["length"]):
        if row.get("found", 0) < ENOUGH:
            break
        reached = row["length"]
    return reached


def by_run(rows: list[Row]) -> dict[str, list[Row]]:
    return {
        run: [row for row in rows if row["run"] == run] for run in dict.fromkeys(row["run"] for row in rows)
    }


def summary(rows: list[Row]) -> list[Row]:
    """A row per run: how far it retrieves, how well within its trained length, and at the longest length."""
    table = []
    for run, own in by_run(rows).items():
        tried = [row for row in own if "found" in row]
        inside = [row["found"] for row in tried if row["length"] <= row["trained"]]
        table.append(
            {
                "run": run,
                "taught": own[0]["taught"],
                "trained": own[0]["trained"],
                "retrieves to": effective_length(own),
                "found within trained": sum(inside) / len(inside) if inside else None,
                "at longest": tried[-1]["found"] if tried else None,
                "longest": tried[-1]["length"] if tried else None,
                "chance": CHANCE,
                "trials": TRIALS,
            }
        )
    return table


def metrics(rows: list[Row]) -> dict[str, float]:
    """How far a run retrieves, by the name that W&B shows."""
    _, *changes = rows[0]["run"].split(" +")
    return {"/".join([f"{rows[0]['split']}/retrieves_to", *changes]): effective_length(rows)}


def draw(rows: list[Row], file: Path) -> None:
    """Fraction of keys found against length, a line per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run, own in by_run(rows).items():
        points = [(row["length"], row["found"]) for row in own if "found" in row]
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=run)
    axes.axhline(CHANCE, color="grey", linewidth=1, label="chance")
    axes.axhline(ENOUGH, color="grey", linestyle="--", linewidth=1, label="enough")
    for trained in {row["trained"] for row in rows}:
        axes.axvline(trained, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="tokens back; dotted: trained length", ylabel="values found", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, dpi=130)
