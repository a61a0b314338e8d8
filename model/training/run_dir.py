"""A run directory belongs to one run: created once, locked while in use, never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import secrets
import subprocess
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import yaml

from data.files import parse_json, write_atomically
from data.prepare import prepare
from data.sources import STDIN
from model.config import UserError, from_home, to_path, validate
from model.training.config import RunConfig


def create(config: RunConfig) -> tuple[Path, IO[str]]:
    """A new, locked directory: `run_dir`, or runs/<date>_<time>_<name> made unique by a suffix.

    Raises UserError when the given one is in use, not empty, or cannot be made.
    """
    if config.run_dir:
        path = to_path(config.run_dir)
        _mkdir(path, exist_ok=True)
        _refuse_used(path)
        handle = lock(path)
        try:
            _refuse_used(path)  # another process may have come and gone since
        except UserError:
            handle.close()
            raise
        return path, handle
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{config.name}"
    for attempt in range(1, 1000):
        path = Path("runs") / (stem if attempt == 1 else f"{stem}_{attempt}")
        try:
            _mkdir(path, exist_ok=False)
            return path, lock(path)
        except FileExistsError:
            continue
    raise UserError(f"runs/{stem}: no free name left; give run_dir=")


def _refuse_used(path: Path) -> None:
    # a kill leaves the lock, and what it was about to write
    if any(entry.name != ".lock" and not re.fullmatch(r"\..*\.tmp", entry.name) for entry in path.iterdir()):
        known = (path / "config.yaml").exists()
        advice = f"continue it with resume={path} or " if known else ""
        raise UserError(
            f"run_dir={path}: already holds {'a run' if known else 'files'}; {advice}give another run_dir"
        )


def _mkdir(path: Path, exist_ok: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
        if not os.access(path, os.W_OK):
            raise PermissionError("not writable")
    except FileExistsError:
        if not exist_ok and path.is_dir():
            raise
        raise UserError(f"run_dir={path}: is a file; give the name of a folder") from None
    except OSError as error:
        raise UserError(f"run_dir={path}: cannot be made ({error}); give another run_dir") from None


def check_plain(path: Path) -> None:
    """Raises UserError when a run directory, perhaps a stranger's, holds links or pipes in place of its files."""
    for folder in (path, path / "checkpoints", path / "evaluation"):
        with suppress(OSError):
            for entry in os.scandir(folder):
                if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                    raise UserError(
                        f"{entry.path}: a link or pipe, which a run does not hold; replace it by its file"
                    )


def lock(path: Path) -> IO[str]:
    """Hold the directory until the returned file is closed or the process ends, however it ends.

    Raises UserError when another process holds it, or when it is not as a run leaves it.
    """
    check_plain(path)
    file = open(path / ".lock", "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"{path}: in use by another training; wait for it, or give another run_dir") from None
    for stale in path.glob(".*.tmp"):  # left by a kill in the middle of a write
        stale.unlink()
    return file


class _PlainYaml(yaml.SafeLoader):  # type: ignore[misc]
    """Without aliases, by which a short file can be endless."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("has aliases, which no run writes")
        return super().compose_node(parent, index)


def load_config(path: Path) -> RunConfig:
    """The configuration that a run was started with. Raises UserError when it is missing or not one."""
    check_plain(path)
    file = path / "config.yaml"
    try:
        values = yaml.load(file.read_text(), _PlainYaml)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a run directory, config.yaml is not readable ({reason})") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not the configuration of a run")
    try:
        return validate(RunConfig, values)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def record(path: Path, config: RunConfig, shards: Path, parent: dict[str, Any] | None) -> str:
    """Write config.yaml and run.json: environment, shards, parent, and the W&B run id, which is returned."""
    values = config.model_dump(mode="json", exclude={"run_dir", "resume"})
    write_atomically(path / "config.yaml", yaml.safe_dump(values, sort_keys=False).encode())
    known = {"id": secrets.token_hex(4), "environment": environment(), "parent": parent} | _read_record(path)
    known["shards"] = from_home(shards.resolve())
    write_json(path / "run.json", known)
    return str(known["id"])


def _read_record(path: Path) -> dict[str, Any]:
    try:
        known = parse_json((path / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def wandb_id(path: Path) -> str | None:
    """The id of the W&B run that a run logs to; None for one that has left no record."""
    recorded = _read_record(path).get("id")
    return recorded if isinstance(recorded, str) else None


def final_row(path: Path) -> dict[str, Any] | None:
    """What a finished run came to, as the table of a sweep has it; None when it left no validation."""
    try:
        val = parse_json((path / "evaluation" / "val.json").read_text())
        row = {"val loss": val["loss"], "perplexity": val["perplexity"], "bits/byte": val["bits_per_byte"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return row | {"run": from_home(path)}


def metrics_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for any that a kill has cut short. Raises UserError when there is no file."""
    try:
        lines = (path / "metrics.jsonl").read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: no readable metrics.jsonl ({error}); expected a run directory") from None
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(parse_json(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def shards(path: Path, config: RunConfig) -> Path:
    """The shards that a run was trained on: where it had them, else prepared again from `config`.

    So a run can be resumed and evaluated from another folder, or when the text has moved. Raises UserError when
    they would be prepared outside the working folder: a run may come from a stranger.
    """
    recorded = _read_record(path).get("shards")
    with suppress(ValueError):  # a name that no file can have
        if isinstance(recorded, str) and to_path(recorded).is_dir():
            return to_path(recorded)
    if config.data.path == STDIN:
        raise UserError(
            f"{path}: its shards are gone, and came from standard input; give data=bin data.path=<shards>"
        )
    out = Path(
        os.path.abspath(to_path(config.data.out or "shards"))
    )  # links in the working folder are the user's
    if Path.cwd() not in out.parents and not (out / "meta.json").exists():
        raise UserError(
            f"{path}: its shards are gone, and new ones would be written to {out}, outside this folder; if that is "
            f"meant, make them first with scripts/prepare.py and data.out={out}"
        )
    return prepare(config.data, config.tokenizer.name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def environment() -> dict[str, str]:
    """Versions and hardware that a result depends on; no path, user name or environment variable."""
    packages = {name: _version(name) for name in ("torch", "numpy", "tiktoken", "wandb", "hydra-core")}
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "git": commit or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
        **packages,
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())
