"""What is measured on a finished run, by the names that claims use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from data import tokenizer
from data.loader import TokenStream
from data.synthetic import longest
from model.config import UserError
from model.evaluation import bigram, memory, probe, retrieval, scores, shuffle, speed
from model.evaluation import lengths as loss_at
from model.evaluation.exact_match import exact_match
from model.evaluation.kept import Kept
from model.evaluation.score_bound import bound_ratio
from model.findings.code_version import code_version
from model.findings.spec import Measure, Scale
from model.load import Run, build_model
from model.training.device import autocast

PROBE_TEST_WINDOWS, SHUFFLE_WINDOWS, SHUFFLE_DRAWS = 64, 480, 4
LOSSES, RETRIEVAL = "losses.json", "retrieval.json"  # what is done of a measure that was stopped
BATCH_TOKENS, PRECISION = 16384, "fp32"
Values = dict[str, float | None]  # None: not defined


def measure(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    """Results by name, as `tables.py` says what they mean; `folder` keeps what is done of a measure that is stopped.

    Those of a run `by layer` are `probe@3`, and `untrained@3` for the same model before its training.
    """
    return behind(what.kind)[0](run, stream, what, scale, folder)


def measure_id(what: Measure, scale: Scale) -> str:
    """What tells the values of two measures apart, the code that makes them included."""
    lengths = ",".join(f"{round(scale.length * multiple)}" for multiple in what.lengths)
    details = {
        "loss": f" {what.protocol} at {lengths} of {round(scale.length * what.longest)}, {scale.val_tokens} tokens",
        "retrieval": f" to {lengths}",
        "probe": f" {scale.probe_steps} steps on {scale.probe_windows} windows",
        "scores": f" at {lengths}, as many tokens as in windows of {round(scale.length * what.longest)}",
    }
    function, modules = behind(what.kind)
    names = [f"model.evaluation.{name}" for name in modules]
    version = code_version(f"model.findings.measure:{function.__name__}", *names)
    return f"{what.kind}{details.get(what.kind, '')}, L {scale.length}, code {version}"


def behind(kind: str) -> tuple[Callable[..., Values], tuple[str, ...]]:
    """The function that takes a measure, and the modules that it does so with."""
    return {
        "loss": (losses, ("perplexity", "windows", "lengths")),
        "retrieval": (retrieved, ("retrieval",)),
        "probe": (probed, ("probe",)),
        "shuffle": (shuffled, ("shuffle", "probe")),
        "bigram": (context_free, ("bigram",)),
        "bound": (bounded, ("score_bound",)),
        "scores": (scored, ("scores",)),
        "memory": (remembered, ("memory",)),
        "speed": (timed, ("speed",)),
        "exact": (exactly, ("exact_match",)),
    }[kind]


def losses(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    tokens = {round(scale.length * multiple): multiple for multiple in what.lengths}
    note = {"measure": measure_id(what, scale)}
    longest = round(scale.length * what.longest)
    plan = loss_at.Plan(sorted(tokens), [what.protocol], scale.length // 4, scale.val_tokens, note, longest)
    kept = Kept(folder / LOSSES)
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
        if row.get("skipped", "").startswith("no document"):
            raise UserError(f"{stream.folder}: {row['skipped']}, which a finding asks for; give longer texts")
        far = [bucket for bucket in row.get("by_position", []) if bucket["from"] >= scale.length]
        if far and far[0]["from"] == scale.length:
            n = sum(bucket["tokens"] for bucket in far)
            values["beyond" + at] = sum(bucket["loss"] * bucket["tokens"] for bucket in far) / n
    return values


def retrieved(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    values: Values = {}
    device = next(run.model.parameters()).device
    for multiple in what.lengths:
        rows = list(
            retrieval.sweep(
                run,
                stream,
                retrieval.evenly_spaced(round(scale.length * multiple)),
                {"measure": measure_id(what, scale)},
                Kept(folder / RETRIEVAL),
                BATCH_TOKENS,
                autocast(device, PRECISION),
            )
        )
        found = [row["found"] for row in rows if "found" in row]
        values[f"retrieves_to@{multiple:g}L"] = retrieval.effective_length(rows) / scale.length
        values[f"found@{multiple:g}L"] = sum(found) / len(found) if found else None
    return values


def probed(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    train = TokenStream(stream.folder, "train")
    windows = probe.train_and_test_windows(
        train, stream, min(scale.probe_windows, len(train) // scale.length), PROBE_TEST_WINDOWS, scale.length
    )
    device = next(run.model.parameters()).device
    values: Values = {}
    for name, model in (("probe", run.model), ("untrained", probe.untrained(run.config).to(device))):
        rows = probe.probe_positions(model, *windows, steps=scale.probe_steps, batch_size=8, lr=1e-2, seed=0)
        found = [row["mad_over_length"] for row in rows]
        values |= {f"{name}@{layer}": value for layer, value in enumerate(found)}
        values |= {f"{name}_embeddings": found[0], f"{name}_best": min(found[1:]), f"{name}_last": found[-1]}
    return values


def shuffled(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    count = min(SHUFFLE_WINDOWS, len(stream) // (scale.length + 1))
    windows = probe.cut_windows(stream, count, scale.length + 1).repeat(SHUFFLE_DRAWS, 1)
    # other tokens and permutations with each seed, so that its interval is about them too
    rows = shuffle.shuffle_losses(run.model, windows, seed=run.config.seed, batch_size=16)
    return {f"rise@{row['arm']}": row["rise"] for row in rows if row["arm"] != "none"}


def context_free(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    vocab_size = tokenizer.vocab_size(run.config.tokenizer.name)
    return {"bigram_loss": bigram.bigram_loss(TokenStream(stream.folder, "train"), stream, vocab_size)}


def bounded(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    base = float(run.config.position["base"])
    return {"bound_ratio": bound_ratio(run.config.model.dims.head_dim, base, scale.length)}


def scored(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    device = next(run.model.parameters()).device
    values: Values = {}
    for multiple in what.lengths:
        count = round(
            scores.WINDOWS * what.longest / multiple
        )  # a maximum over as many tokens at each length
        windows = probe.cut_windows(stream, count, round(scale.length * multiple)).to(device)
        within, beyond = scores.largest_scores(run.model, windows, scale.length)
        values |= {f"score_within@{multiple:g}L": within, f"score_beyond@{multiple:g}L": beyond}
    return values


def remembered(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    train, length = run.config.train, run.config.model.context_length
    device = next(run.model.parameters()).device
    windows = probe.cut_windows(stream, train.micro_batch_size or train.batch_size, length).to(device)
    return {"saved_mb": memory.saved_bytes(run.model, windows, autocast(device, train.precision)) / 1e6}


def timed(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    train, length = run.config.train, run.config.model.context_length
    device = next(run.model.parameters()).device
    shape = run.config.model.model_copy(update={"context_length": scale.length, "original_length": None})
    sinusoidal = {"_target_": "model.position.additive.Sinusoidal", "base": 10000.0}
    reference = build_model(run.config.model_copy(update={"model": shape, "position": sinusoidal})).to(device)
    rows = train.micro_batch_size or train.batch_size
    windows = probe.cut_windows(stream, rows, length).to(device)
    others = probe.cut_windows(stream, max(rows * length // scale.length, 1), scale.length).to(device)
    own, its = speed.token_seconds(
        [(run.model, windows), (reference, others)], autocast(device, train.precision)
    )
    return {"token_cost": own / its}


def exactly(run: Run, stream: TokenStream, what: Measure, scale: Scale, folder: Path) -> Values:
    known, limit = longest(run.config.model.context_length + 1), run.model.position.max_length
    task, name = run.config.data.task, run.config.tokenizer.name
    found = [
        exact_match(run.model, task, name, n) if limit is None or 2 * n + 1 <= limit else math.nan
        for n in range(1, 2 * known + 1)
    ]
    beyond = fmean(found[known:])
    return {"exact_within": fmean(found[:known]), "exact_beyond": None if math.isnan(beyond) else beyond}
