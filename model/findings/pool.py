"""Jobs in processes of their own, as many as there are cores, with one display of how far they are."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing import active_children, get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from data.workers import end_with_parent, starting
from model.errors import RunFailed
from model.findings.jobs import Job, Plan
from model.training.device import pick_device

SECONDS_BETWEEN_LOOKS = 5  # at how far trainings are; one that ends is noticed at once
SECONDS_BETWEEN_LINES = 30  # where there is no terminal
TRIES = 2  # of a job whose worker was killed, as happens when memory is short
SECONDS_TO_SAVE = 60
MEASURING = 0.15  # of the cost of a training, about


def weights_of(job: Job) -> Job:
    """The job whose checkpoint has the weights that `job` is about."""
    return job if job.trains or job.parent is None else weights_of(job.parent)


def has_weights(job: Job, work: Path) -> bool:
    """Whether the checkpoint of a finished training is on this machine."""
    return (work / job.key / "checkpoints" / f"step_{job.config.train.steps:08d}.pt").exists()


def required(plan: Plan, work: Path) -> dict[str, Job]:
    """What has to be run yet: jobs without their results, and parents whose weights are not on this machine."""
    needed: dict[str, Job] = {}

    def need(job: Job) -> None:
        if job.parent is not None and not has_weights(weights_of(job.parent), work):
            need(weights_of(job.parent))
        needed[job.key] = job

    for job in plan.jobs.values():
        if not plan.results.is_done(job):
            need(job)
    return needed


def cost(job: Job) -> float:
    """Tokens to train on, and some for what is measured; for the estimate of the time left."""
    train = job.config.train
    tokens = train.steps * train.batch_size * job.config.model.context_length if job.trains else 0
    return tokens + MEASURING * 1e6 * len(job.measures)


def gpus_for(plan: Plan) -> list[str]:
    """The GPUs that this command may use, as CUDA_VISIBLE_DEVICES names them, if its trainings run on any."""
    if all(pick_device(job.config.train.device, "train.device").type != "cuda" for job in plan.jobs.values()):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def run_all(replan: Callable[[], Plan], work: Path, workers: int, threads: int, gpus: list[str]) -> Plan:
    """Run everything that `replan` finds to be done, and return the plan that has nothing left.

    Workers take the `gpus` in turn, if there are any.

    Raises RunFailed at the end when jobs failed. On Ctrl-C and SIGTERM workers save their training and stop.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the workers: this process has counted its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = new_pool(workers, gpus)
    running: dict[str, tuple[Job, Future[None]]] = {}
    failed: Counter[str] = Counter()
    finished: dict[str, int] = {}  # jobs to the number of their measures
    with Display() as display:
        try:
            while True:
                broken = False
                for key, (job, future) in list(running.items()):
                    if future.done():
                        del running[key]
                        finished[key] = len(job.measures)
                        error = future.exception()
                        broken |= isinstance(error, BrokenProcessPool)
                        failed[key] += (
                            0 if error is None else 1 if isinstance(error, BrokenProcessPool) else TRIES
                        )
                if broken:  # a worker was killed, and took the others with it
                    end_workers(pool)
                    pool = new_pool(workers, gpus)
                plan = replan()
                for key, job in plan.jobs.items():
                    if (
                        finished.get(key) == len(job.measures)
                        and not failed[key]
                        and not plan.results.is_done(job)
                    ):
                        failed[key] += TRIES  # or it would be run for ever
                        with open(work / key / "log.txt", "a") as log:
                            log.write(
                                "Results are not as asked; was code changed while it ran? Give the command again\n"
                            )
                todo = {k: job for k, job in required(plan, work).items() if failed[k] < TRIES}
                possible = [
                    job
                    for key, job in todo.items()
                    if key not in running
                    and (job.parent is None or has_weights(weights_of(job.parent), work))
                ]
                # the longest first, so that no core waits at the end; one that may have broken a pool, alone
                possible.sort(key=lambda job: (failed[job.key], -cost(job)))
                while possible and len(running) < workers and not any(failed[key] for key in running):
                    if failed[possible[0].key] and running:
                        break
                    job = possible.pop(0)
                    with starting():
                        running[job.key] = (job, pool.submit(do, describe(job, plan, work, threads)))
                if not running:
                    break
                display.show(plan, [job for job, _ in running.values()], list(todo.values()), work)
                wait([future for _, future in running.values()], SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
        finally:
            end_workers(pool)
    lost = [key for key, count in failed.items() if count >= TRIES]
    if lost:
        logs = ", ".join(str(work / key / "log.txt") for key in lost)
        raise RunFailed(f"{len(lost)} of {len(plan.jobs)} runs failed; the reasons are at the end of {logs}")
    return plan


def end_workers(pool: ProcessPoolExecutor) -> None:
    """Each is asked to stop, which saves in a training, and killed when it does not."""
    workers = active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(SECONDS_TO_SAVE)
        worker.kill()
    pool.shutdown(cancel_futures=True)


def new_pool(workers: int, gpus: list[str]) -> ProcessPoolExecutor:
    context = get_context("spawn")
    return ProcessPoolExecutor(workers, context, begin, (gpus, context.Value("i", 0)))


def begin(gpus: list[str], turn: Synchronized[int]) -> None:
    """A worker ends with its parent, and sees one GPU."""
    end_with_parent()
    if gpus:
        with turn.get_lock():
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[turn.value % len(gpus)]
            turn.value += 1


def do(description: str) -> None:
    """A job, in a worker; what it prints, and why it fails, goes to log.txt in its folder."""
    from model.findings.work import main  # which imports this module

    what = json.loads(description)
    file = Path(what["work"]) / what["key"] / "log.txt"
    with open(file, "a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
            main(what)
        except SystemExit:  # a training that was asked to stop, and saved; the pool would keep the process
            log.flush()
            os._exit(1)
        except BaseException as error:
            traceback.print_exc()
            raise RunFailed(str(error)) from None


def describe(job: Job, plan: Plan, work: Path, threads: int) -> str:
    """What a worker has to know. Makes the folder of the job."""
    (work / job.key).mkdir(parents=True, exist_ok=True)
    return json.dumps(
        {
            "key": job.key,
            "name": job.name,
            "config": job.config.model_dump(mode="json"),
            "weights": str(work / weights_of(job).key),
            "parent": str(work / weights_of(job.parent).key) if job.parent else None,
            "trains": job.trains,
            "measures": [what.model_dump() for what in job.measures],
            "scale": plan.scale.model_dump(),
            "results": str(plan.results.folder),
            "work": str(work),
            "threads": threads,
        }
    )


class Display:
    """Runs done, what is running, and the time left: a live line on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[done]}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", done="", text="")
        self._began, self._spoke = time.monotonic(), 0.0
        self._before: float | None = None  # what had been worked off when the command was given

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, plan: Plan, running: list[Job], todo: list[Job], work: Path) -> None:
        total = sum(cost(job) for job in plan.jobs.values())
        left = sum(cost(job) * (1 - progress_of(job, work)) for job in todo)
        if self._before is None:
            self._before = total - left
        seconds = time.monotonic() - self._began
        worked = total - left - self._before  # jobs that tuning has decided about meanwhile are in both
        eta = f"{seconds * left / worked / 60:.0f} min left" if worked > 0 and seconds > 10 else "estimating"
        waiting = f", {plan.waiting} wait for tuning" if plan.waiting else ""
        done = f"{len(plan.jobs) - len(todo)} of {len(plan.jobs)} runs{waiting}"
        text = f"{eta}; running {'; '.join(job.name for job in running)}"
        self._bar.update(self._task, total=total, completed=total - left, done=done, text=text)
        if not self._console.is_terminal and time.monotonic() - self._spoke > SECONDS_BETWEEN_LINES:
            print(f"{done} done, {text}", flush=True)
            self._spoke = time.monotonic()


def progress_of(job: Job, work: Path) -> float:
    """The part of a training that is done, from the last line of its metrics."""
    with suppress(OSError, ValueError, IndexError, KeyError):
        last = (work / job.key / "metrics.jsonl").read_text().splitlines()[-1]
        return float(json.loads(last)["step"]) / job.config.train.steps * (1 - MEASURING)
    return 0.0
