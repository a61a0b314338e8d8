"""What the tests of preparation share: a configuration, what a folder holds, and ways to die."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from data import workers
from data.sources import DataConfig
from tests.conftest import ROOT


def config(path: Path, out: Path, **changes: object) -> DataConfig:
    values = {"source": "text", "path": str(path), "out": str(out), "val_fraction": 0.2, "workers": 1}
    return DataConfig.model_validate(values | changes)


def silent(_: str) -> None:
    pass


def digests(folder: Path) -> dict[str, str]:
    """Every file by name: also that nothing else is left in the folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def report(folder: Path) -> dict[str, dict[str, int]]:
    return json.loads((folder / "meta.json").read_text())["report"]  # type: ignore[no-any-return]


def run(*arguments: str, cwd: Path, code: int = 0, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **more)  # type: ignore[call-overload]
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr + result.stdout
    return result  # type: ignore[no-any-return]


class Killed(BaseException):
    pass


def die(*_: object) -> None:
    os._exit(9)


def kill_after(n: int) -> Callable[..., object]:
    """In place of workers.encode_in_order: the n-th result never comes."""

    def encode_in_order(pieces: object, *arguments: object) -> object:
        for i, done in enumerate(real(pieces, *arguments)):  # type: ignore[arg-type]
            if i == n:
                raise Killed
            yield done

    real = workers.encode_in_order
    return encode_in_order


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
