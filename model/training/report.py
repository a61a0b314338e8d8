"""What a person sees of a training: a live line, the validations, a sample, a table, what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from data import tokenizer
from data.progress import live_bar
from model.config import UserError
from model.evaluation.perplexity import Score
from model.generate import Sampling, generate
from model.gpt import GPT
from model.launch import print_table
from model.training.config import RunConfig

SAMPLE_TOKENS = 120
SECONDS_BETWEEN_LINES = 10  # where there is no terminal to keep a live line on


def started(
    path: Path, model: GPT, device: torch.device, precision: partial[torch.autocast], processes: int = 1
) -> None:
    kind = "bf16" if precision.keywords["enabled"] else "fp32"
    told = "" if model.config.causal else " to tell masked tokens from both sides (model.causal=false)"
    on = device.type if processes == 1 else f"{processes} processes, {device.type},"
    print(
        f"Training {model.parameter_count():,} parameters on {on} in {kind}{told}; run directory {path}",
        flush=True,
    )


class Progress:
    """Step, loss, tokens/s and time left: a live line on a terminal, else a line every few seconds."""

    def __init__(self, steps: int, first_step: int) -> None:
        self._console = Console(soft_wrap=True)
        self._bar = live_bar(self._console, TextColumn("step"), MofNCompleteColumn())
        self._task = self._bar.add_task("", total=steps, completed=first_step, text="")
        self._steps, self._first, self._began, self._said = (
            steps,
            first_step,
            time.monotonic(),
            time.monotonic(),
        )
        self._text = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        self._text = f"loss {loss:.3f} | {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, text=self._text)
        if not self._console.is_terminal and time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            left = (time.monotonic() - self._began) / (step - self._first) * (self._steps - step)
            with suppress(OSError):  # a training outlives the pipe that it talks to
                print(f"step {step}/{self._steps} | {self._text} | ETA {left:.0f} s", flush=True)
            self._said = time.monotonic()

    def evaluating(self, done: int, total: int) -> None:
        self._bar.update(self._task, text=f"{self._text} | validating {done / total:4.0%}")

    def note(self, sentence: str) -> None:
        """Print something that stays on the screen."""
        with suppress(OSError):
            self._console.print(sentence, highlight=False, markup=False)

    def say(self, step: int, loss: float | None, val: Score) -> None:
        """Print a validation; it stays on the screen."""
        train = "" if loss is None else f" | train {loss:.4f}"
        error = "" if val.standard_error is None else f" ± {val.standard_error:.4f}"
        bits = "" if val.bits_per_byte is None else f" | {val.bits_per_byte:.3f} bits/byte"
        with suppress(OSError):
            self._console.print(
                f"step {step}/{self._steps}{train} | val {val.loss:.4f}{error}"
                f" | perplexity {val.perplexity:.2f}{bits}",
                highlight=False,
            )


def sample(model: GPT, config: RunConfig) -> tuple[str, str] | None:
    """A continuation of the data's prompt, as (prompt, text).

    None when the tokenizer's data is not there, or when the model continues no text.
    """
    if config.objective == "mlm":
        return None
    try:
        encoding = tokenizer.load(config.tokenizer.name)
    except UserError as error:
        print(f"warning: no sample ({error})", file=sys.stderr)
        return None
    prompt = encoding.encode_ordinary(config.data.prompt) or [encoding.eot_token]
    sampling = Sampling(max_new_tokens=SAMPLE_TOKENS, top_p=0.95, seed=config.seed, overflow="slide")
    new = [row[0] for row in generate(model, [prompt], sampling, stop=encoding.eot_token)]
    return config.data.prompt, "".join(tokenizer.stream(encoding, [t for t in new if t is not None]))


def finished(
    path: Path,
    steps: int,
    length: int,
    causal: bool,
    val: Score,
    summary: dict[str, Any],
    text: tuple[str, str] | None,
) -> None:
    if text is not None:
        print(f"\nSample (temperature 0.8, top-p 0.95):\n{text[0]}|{text[1]}\n")
    row = {
        "val loss": val.loss,
        "perplexity": val.perplexity,
        "bits/byte": val.bits_per_byte,
        "tokens/s": round(summary["perf/mean_tokens_per_s"] or 0) or None,
        "parameters": summary["parameters"],
        "tokens scored": val.tokens,
    }
    print_table([row])
    where, python = shlex.quote(str(path)), _command("python")
    lengths = ",".join(str(length * factor) for factor in (1, 2, 4))
    purposes, commands = "", ""
    if causal:
        purposes = "to generate, to score beyond the trained length, "
        commands = (
            f'  {python} scripts/sample.py run={where} prompt="In the beginning"\n'
            f"  {python} scripts/evaluate.py run={where} 'lengths=[{lengths}]'\n"
        )
    print(
        f"Run directory: {path}\n\nNext, {purposes}to train on, "
        f"and to compare the curves of offline runs in the terminal:\n{commands}"
        f"  {python} train.py resume={where} train.steps={2 * steps}\n"
        f"  {_command('wandb')} leet {shlex.quote(str(path.parent / 'wandb'))}"
    )


def _command(name: str) -> str:
    """How to call a program of this environment from the shell that started us."""
    beside = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent == beside.parent:
        return name
    return shlex.quote(os.path.relpath(beside))
