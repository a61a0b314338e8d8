"""What people type, as Hydra's grammar wants it."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from model.config import CONF, homes, to_path

# values that are free text, which Hydra's grammar would otherwise split at commas, equals signs and quotes
PATHS = ("run", "run_dir", "resume", "init_from", "data.path", "data.out", "out")
HERE = r"(^|[,\['\"]){}(?=[/,\]'\"]|$)"  # as a whole path, or one in a list
FREE_TEXT = ("prompt", "data.prompt", *PATHS)


def quoted(argument: str, multirun: bool) -> str:
    key, equals, value = argument.partition("=")
    is_prompt = key.lstrip("+") in {"prompt", "data.prompt"}
    if not equals or key.lstrip("+") not in FREE_TEXT or value in {"", "null"}:
        return argument
    if multirun and "," in value and not to_path(value).exists():
        return argument  # a sweep
    if value[0] in "['\"" and _parses(argument) and not to_path(value).exists():
        return argument  # a list or a quoted string, as Hydra writes them
    if is_prompt:
        value = value.replace("${", r"\${")
    # in Hydra's grammar a backslash escapes a quote, and itself only in front of one
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", value)
    escaped = re.sub(r"(\\+)$", lambda m: m[1] * 2, escaped)
    return f"{key}='{escaped}'"


def without_home(argument: str) -> str:
    """A path below the home directory with ~, which no record of a sweep tells."""
    key, equals, value = argument.partition("=")
    if not equals or key.lstrip("+") not in PATHS:
        return argument
    for home in homes():
        value = re.sub(HERE.format(re.escape(home)), r"\1~", value)
    return f"{key}={value}"


def swept_with_their_groups(arguments: list[str]) -> list[str]:
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
