"""How every command starts: Hydra composes, mistakes become one sentence, multiruns end with a table."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from model import sweep
from model.arguments import quoted, swept_with_their_groups, without_home
from model.config import CONF, RunFailed, UserError
from model.mistakes import explained

SECONDS_FOR_FIRST = 10  # to say what went wrong, before torchrun sees another process fail and ends it


def main(config_name: str, task: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Run `task` with the composed configuration as a plain dict; exit with 2 on a user's mistake, 1 on RunFailed.

    With -m, every job runs even when one fails; the rows that the tasks return are printed at the end.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise here instead of printing a traceback and exiting with 1
    # threads that wait spin by default; on a core that another program wants, that slows training fivefold
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ?, it does not fail
    rank = int(os.environ.get("RANK", 0))  # of a process that torchrun started
    who = f"[rank {rank}] " if rank else ""
    if rank:
        sys.stdout = open(os.devnull, "w")  # one process speaks
    multirun = bool({"-m", "--multirun"} & set(sys.argv))

    def refuse(sentence: str) -> NoReturn:
        if rank:  # the first reads the same line, and ends this process with its own
            time.sleep(SECONDS_FOR_FIRST)
        print(f"{who}error: {sentence}", file=sys.stderr)
        sys.exit(2)

    if multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        refuse("torchrun starts one training; a sweep (-m) starts its own")
    given = [argument for argument in sys.argv[1:] if re.match(r"[\w/]+=[\w-]+$", argument)]
    for argument in sys.argv[1:]:
        key, equals, option = argument.partition("=")
        if equals and "." in key and re.fullmatch(r"[\w.]+", key) and (CONF / key.replace(".", "/")).is_dir():
            refuse(f"{argument}: a group is named with a slash; give {key.replace('.', '/')}={option}")
    sys.argv[1:] = [without_home(argument) for argument in sys.argv[1:]]
    sweep.typed = [os.path.relpath(sys.argv[0]), *sys.argv[1:]]
    sys.argv[1:] = [quoted(argument, multirun) for argument in sys.argv[1:]]
    sys.argv[1:] = swept_with_their_groups(sys.argv[1:]) if multirun else sys.argv[1:]
    code = started = 0  # of a single job; those of a sweep are in its folder, for they may be other processes

    def job(cfg: DictConfig) -> None:
        nonlocal code, started
        started += 1
        entry = sweep.current()
        if entry is None:
            _, code, _ = attempt(cfg)
        elif sweep.problem is None and not (entry.folder / sweep.STOP).exists():
            with entry.held() as is_ours:
                if not is_ours:
                    print(f"\n[job {entry.number}]: another process is at it", flush=True)
                elif entry.read().get("status") == "done":
                    print(f"\n[job {entry.number}]: done before", flush=True)
                else:
                    run_job(cfg, entry)

    def run_job(cfg: DictConfig, entry: sweep.Job) -> None:
        hydra_config = HydraConfig.get()
        label = f"[job {entry.number}] {' '.join(hydra_config.overrides.task)}"
        alone = hydra_config.launcher._target_.endswith("BasicLauncher")
        print(f"\n{label}" + ("" if alone else f": output goes to {entry.log}"), flush=True)
        entry.write(status="running")
        with ExitStack() as stack:
            if not alone:  # side by side, their lines would mix
                log = stack.enter_context(open(entry.log, "a", buffering=1))
                stack.enter_context(redirect_stdout(log))
                stack.enter_context(redirect_stderr(log))
            try:
                row, exit_code, wrong = attempt(cfg)
            except SystemExit as stop:  # by a signal
                entry.write(status="stopped", code=stop.code)
                if not sweep.side_by_side(hydra_config):
                    raise
                (entry.folder / sweep.STOP).touch()
                return
            except Exception as error:  # memory that is short, or a mistake of ours: the other jobs go on
                traceback.print_exc()
                row, exit_code, wrong = None, 1, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        entry.write(status="failed" if exit_code else "done", row=row, code=exit_code, error=wrong)
        if exit_code and not alone:
            print(f"{label}: error: {wrong}", file=sys.stderr, flush=True)

    def attempt(cfg: DictConfig) -> tuple[dict[str, Any] | None, int, str | None]:
        """The row of a job, its exit code, and what was wrong."""
        try:
            values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            assert isinstance(values, dict)
            return task({str(key): value for key, value in values.items()}), 0, None
        except (UserError, RunFailed, OmegaConfBaseException, YAMLError, OSError) as error:
            sentence = explained(error, config_name, given)
            if getattr(error, "said", False):
                time.sleep(SECONDS_FOR_FIRST)
            else:
                print(f"{who}error: {sentence}", file=sys.stderr, flush=True)
            return None, 1 if isinstance(error, RunFailed | OSError) else 2, sentence

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
    except KeyboardInterrupt:
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        if started and not isinstance(error, HydraException | OmegaConfBaseException):
            raise  # ours, not a mistake in what was typed
        refuse(explained(error, config_name, given))
    except RuntimeError as error:
        if not multirun:
            raise
        print(f"error: a job ended without a word ({str(error).splitlines()[0]})", file=sys.stderr)
    if multirun and sweep.problem:
        refuse(sweep.problem)
    if multirun:
        code = _report(sweep.latest)
    if code:
        sys.exit(code)


def _report(folder: Path | None) -> int:
    """Print what the jobs of a sweep came to; the exit code is the highest of theirs."""
    if folder is None:
        return 0
    found = [(label, job.read()) for label, job in sweep.jobs(folder)]
    rows = [{"job": label, **known["row"]} for label, known in found if known.get("row")]
    if rows:
        print_table(rows)
    undone = [
        f"{label} ({known.get('error') or known.get('status', 'not started')})"
        for label, known in found
        if known.get("status") != "done"
    ]
    if undone:
        print(
            f"error: {len(undone)} of {len(found)} jobs failed or were stopped: {'; '.join(undone)}\n"
            f"run these again with: {sweep.command_to_finish(folder)}",
            file=sys.stderr,
        )
    return max([known.get("code") or 0 for _, known in found], default=0) or bool(undone)


def fresh() -> None:
    """Forget the command that this process has started with, so that `main` can be called again."""
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def overridden() -> list[str]:
    """The keys and groups that were given on the command line, in order."""
    given = [re.split(r"[=@]", override, maxsplit=1)[0] for override in HydraConfig.get().overrides.task]
    return [key.lstrip("+~") for key in given]


def choice(group: str) -> str:
    """The option of a config group that this job has."""
    return str(HydraConfig.get().runtime.choices[group])


def group() -> tuple[str | None, list[str]]:
    """The name of the sweep that this job belongs to, and its overrides; (None, []) outside one."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return None, []
    return f"sweep_{Path(config.sweep.dir).name}", list(config.overrides.task)


def chosen_scaling(position: dict[str, Any] | None) -> dict[str, Any] | None:
    """What position/scaling= was given to a command that takes a finished run; None when it was not."""
    return None if position is None else position.get("scaling")


def print_table(rows: list[dict[str, Any]], title: str | None = None) -> None:
    """A table for people: one column per key, numbers on the right."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        is_number = all(isinstance(row.get(column, 0), int | float) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a file or a pipe has no edge to wrap at
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        decimals = 0 if abs(value) >= 1000 else 2 if abs(value) >= 10 else 4
        return f"{value:,.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
