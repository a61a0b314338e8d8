"""Kill trainings at random instants, and prove that nothing is lost: `python scripts/soak.py kills=200`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import PositiveInt

from model import launch
from model.config import RunFailed, Strict, UserError, to_path, validate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# where a kill comes at a random line of the module; None: at a random time, which is mostly within torch
PLACES = (None, "train", "data/files", "data/loader", "model/training/run_dir", "model/training/checkpoint",
          "model/training/metrics", "model/training/loop", "model/evaluation/perplexity")  # fmt: skip
RUN = ["data=text", "data.path=text.txt", "data.prompt=", "tokenizer=bytes", "model.n_layer=1", "model.n_embd=32",
       "model.context_length=32", "model.dropout=0.1", "train.batch_size=4", "train.micro_batch_size=2",
       "train.eval_interval=5", "train.save_interval=3", "train.log_interval=1", "train.eval_tokens=2000",
       "train.precision=fp32", "train.device=cpu"]  # fmt: skip
MARK = "soak"  # of a folder that may be emptied
WITH_WANDB = 0.1  # of the pieces, which start slowly


class SoakConfig(Strict):
    kills: PositiveInt
    steps: PositiveInt
    seed: int
    work: str


def main(values: dict[str, Any]) -> None:
    config = validate(SoakConfig, values)
    import torch

    import train  # and all that it uses, so that each training starts at once

    torch.set_num_threads(1)
    work = to_path(config.work).resolve()
    if work.exists() and not (work / MARK).exists():
        raise UserError(f"work={work}: is there already, and would be emptied; give another")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    Path(MARK).touch()
    Path("text.txt").write_text("In the beginning God created the heaven and the earth. " * 2000)
    draw, kills, trainings = random.Random(config.seed), Counter[str](), 0
    options = [*RUN, f"train.steps={config.steps}", "resume=auto"]
    piece([*options, "run_dir=straight", "logger.mode=disabled"], train.main)
    while kills.total() < config.kills:
        run, attempts = f"run_{trainings}", 0
        while True:
            place = draw.choice(PLACES)
            mode = "offline" if draw.random() < WITH_WANDB else "disabled"
            instant = draw.random() ** 2  # early ones are as many as there are files to be made
            code = piece([*options, f"run_dir={run}", f"logger.mode={mode}"], train.main, place, instant)
            attempts += 1
            if code == 0 and finished(Path(run), config.steps):
                break
            if code not in {0, -signal.SIGKILL}:
                raise RunFailed(f"{work / run}: attempt {attempts} ended with {code}; see {work / 'log.txt'}")
            kills[place or "any time"] += code == -signal.SIGKILL
        trainings += 1
        compare(work / run, work / "straight")
        shutil.rmtree(run)
        print(f"{kills.total()} kills, {trainings} trainings as if they had been left alone", flush=True)
    launch.print_table([{"killed in": place, "times": n} for place, n in sorted(kills.items())])


def piece(
    arguments: list[str], task: Callable[..., Any], place: str | None = None, instant: float | None = None
) -> int:
    """Train in a child of this process, killed at `instant` from 0 to 1 of what it does; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if instant is not None:
                (kill_in(place, instant) if place else kill_after(instant))
            launch.fresh()
            sys.argv = ["train.py", *arguments]
            launch.main("config", task)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_after(instant: float, longest: float = 1.5) -> None:
    """Kill this process, so many seconds from now."""

    def wait() -> None:
        time.sleep(instant * longest)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def kill_in(place: str, instant: float, lines: int = 1500) -> None:
    """Kill this process at the n-th line that it executes of a module."""
    file, left = str(ROOT / f"{place}.py"), [int(instant * lines)]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def finished(run: Path, steps: int) -> bool:
    with suppress(OSError, ValueError, KeyError, IndexError):
        return bool(json.loads((run / "evaluation/val.json").read_text())["step"] == steps) and bool(
            list(run.glob(f"checkpoints/step_{steps:08d}.pt"))
        )
    return False


def compare(run: Path, straight: Path) -> None:
    """Raises RunFailed unless both have the same weights, optimizer, random state, metrics and no litter."""
    from model.training import checkpoint

    ours, theirs = (checkpoint.read(checkpoint.newest_first(path)[0]) for path in (run, straight))
    different = [key for key in theirs if not same(ours[key], theirs[key])]
    best, their_best = (checkpoint.read(path / "checkpoints" / "best.pt") for path in (run, straight))
    different += [f"{key} of best.pt" for key in their_best if not same(best[key], their_best[key])]
    rows, others = (
        [
            {key: value for key, value in json.loads(line).items() if not key.startswith("perf/")}
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        for path in (run, straight)
    )
    litter = [str(path) for path in run.rglob("*.tmp")]
    if different or rows != others or litter:
        raise RunFailed(
            f"{run} is not as if it had been left alone: checkpoint {different or 'the same'}, metrics "
            f"{'the same' if rows == others else 'different'}, litter {litter or 'none'}"
        )


def same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


if __name__ == "__main__":
    launch.main("soak", main)
