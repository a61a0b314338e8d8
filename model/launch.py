"""How every command starts: Hydra composes, mistakes become one sentence, multiruns end with a table."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from model.config import CONF, RunFailed, UserError, flat_keys, nearest

# values that are free text, which Hydra's grammar would otherwise split at commas, equals signs and quotes
FREE_TEXT = ("prompt", "data.prompt", "run", "run_dir", "resume", "init_from", "data.path", "data.out", "out")
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
    if multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        print(f"{who}error: torchrun starts one training; a sweep (-m) starts its own", file=sys.stderr)
        sys.exit(2)
    given = [argument for argument in sys.argv[1:] if re.match(r"[\w/]+=[\w-]+$", argument)]
    for argument in sys.argv[1:]:
        key, _, option = argument.partition("=")
        if "." in key and re.fullmatch(r"[\w.]+", key) and (CONF / key.replace(".", "/")).is_dir():
            print(
                f"error: {argument}: a group is named with a slash; give {key.replace('.', '/')}={option}",
                file=sys.stderr,
            )
            sys.exit(2)
    sys.argv[1:] = [_quoted(argument, multirun) for argument in sys.argv[1:]]
    sys.argv[1:] = _swept_with_their_groups(sys.argv[1:]) if multirun else sys.argv[1:]
    rows: list[dict[str, Any]] = []
    failed: dict[str, int] = {}  # job to exit code
    started = 0

    def job(cfg: DictConfig) -> None:
        nonlocal started
        started += 1
        label = " ".join(HydraConfig.get().overrides.task)
        if multirun:
            print(f"\n[job {HydraConfig.get().job.num}] {label}", flush=True)
        try:
            values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            assert isinstance(values, dict)
            row = task({str(key): value for key, value in values.items()})
        except (UserError, RunFailed, OmegaConfBaseException, OSError) as error:
            if getattr(error, "said", False):
                time.sleep(SECONDS_FOR_FIRST)
            else:
                print(f"{who}error: {_sentence(error, config_name, given)}", file=sys.stderr, flush=True)
            failed[label] = 1 if isinstance(error, RunFailed | OSError) else 2
            return
        if row:
            rows.append({"job": label, **row})

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
    except KeyboardInterrupt:
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if started and not isinstance(error, HydraException | OmegaConfBaseException):
            raise  # ours, not a mistake in what was typed
        if rank:  # the first reads the same line, and ends this process with its own
            time.sleep(SECONDS_FOR_FIRST)
        else:
            print(f"error: {_sentence(error, config_name, given)}", file=sys.stderr)
        sys.exit(2)
    if multirun and rows:
        print_table(rows)
    if failed and multirun:
        print(
            f"error: {len(failed)} of {started} jobs failed: {'; '.join(failed)}",
            file=sys.stderr,
        )
    if failed:
        sys.exit(max(failed.values()))


def overridden() -> list[str]:
    """The keys and groups that were given on the command line, in order."""
    given = [re.split(r"[=@]", override, maxsplit=1)[0] for override in HydraConfig.get().overrides.task]
    return [key.lstrip("+~") for key in given]


def choice(group: str) -> str:
    """The option of a config group that this job has."""
    return str(HydraConfig.get().runtime.choices[group])


def sweep() -> tuple[str | None, list[str]]:
    """The name of the multirun that this job belongs to, and its overrides; (None, []) outside one."""
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
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def _quoted(argument: str, multirun: bool) -> str:
    key, equals, value = argument.partition("=")
    is_prompt = key.lstrip("+") in {"prompt", "data.prompt"}
    if not equals or key.lstrip("+") not in FREE_TEXT or value in {"", "null"}:
        return argument
    if multirun and "," in value and not Path(value).exists():
        return argument  # a sweep
    if value[0] in "['\"" and _parses(argument) and not Path(value).exists():
        return argument  # a list or a quoted string, as Hydra writes them
    if is_prompt:
        value = value.replace("${", r"\${")
    # in Hydra's grammar a backslash escapes a quote, and itself only in front of one
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", value)
    escaped = re.sub(r"(\\+)$", lambda m: m[1] * 2, escaped)
    return f"{key}='{escaped}'"


def _swept_with_their_groups(arguments: list[str]) -> list[str]:
    """Keys of a group that is swept wait for the jobs: Hydra sets all others before it knows the options."""
    pairs = [argument.partition("=") for argument in arguments]
    swept = tuple(
        f"{key.replace('/', '.')}." for key, _, value in pairs if "," in value and (CONF / key).is_dir()
    )
    return [
        f"{key}=choice({value})"
        if swept and key.startswith(swept) and _parses(f"{key}={value}")
        else argument
        for argument, (key, _, value) in zip(arguments, pairs, strict=True)
    ]


def _parses(argument: str) -> bool:
    try:
        return not OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False


def _sentence(error: Exception, config_name: str, given: list[str]) -> str:
    """What Hydra and OmegaConf say over several lines, as one sentence with the nearest valid name."""
    text = str(error)
    unknown = re.search(r"Could not override '([^']*)'", text)
    if unknown and re.match(r"position[./]scaling", unknown[1]):
        scaled = [path.stem for path in (CONF / "position").glob("*.yaml") if "scaling:" in path.read_text()]
        return (
            f"{unknown[1]}: not a key here; position={', '.join(sorted(scaled))} can be scaled, "
            f"by position/scaling=<name>, which has keys of its own"
        )
    if unknown:
        return f"{unknown[1]}: unknown key{nearest(unknown[1], _valid_keys(config_name, given))}"
    group = re.search(r"Could not find '([^']*)/([^'/]*)'", text)
    if group:
        options = [path.stem for path in (CONF / group[1]).glob("*.yaml")]
        return f"{group[1]}={group[2]}: no such option{nearest(group[2], options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be parsed as key=value; put quotes around special characters"
    if text.startswith("Config group override"):
        return "a config group takes the name of an option, not null or a value; no position is position=none"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        key = getattr(error, "full_key", None) or missing[1]
        return f"{key}: missing; give {key}=<value>"
    return " ".join(text.split())


def _valid_keys(config_name: str, given: list[str]) -> list[str]:
    """All keys of the configuration with the groups that the user chose."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [argument for argument in given if (CONF / argument.split("=")[0]).is_dir()]
    for overrides in (chosen, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                values = OmegaConf.to_container(compose(config_name, overrides), resolve=False)
        except HydraException:
            continue
        assert isinstance(values, dict)
        return flat_keys({str(key): value for key, value in values.items()}) + sorted(groups & values.keys())
    return []
