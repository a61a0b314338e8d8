"""Metrics: a JSONL file that is always complete, and W&B beside it, which can never stop a training."""

from __future__ import annotations

import errno
import json
import netrc
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlparse

import torch

from data.files import parse_json, write_atomically
from model.errors import RunFailed
from model.training import run_dir
from model.training.config import LoggerConfig

PATIENCE = 60.0  # seconds for W&B to take the rest of a run that has ended
# peak dense bf16 FLOP/s by a part of the device's name, from NVIDIA's data sheets
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def mfu(flops_per_second: float, device: torch.device) -> dict[str, float]:
    """Model FLOPs utilisation as a metric; nothing for a device whose peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    return {"perf/mfu": flops_per_second / peak} if peak else {}


class JsonLines:
    """metrics.jsonl: one object a line, each written whole. A resumed run first drops what lies ahead."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path, kept = path, []
        self.dropped_to = 0  # the last step that is run again
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    step = int(parse_json(line)["step"])
                    if step <= resumed_step:
                        kept.append(line)
                    else:
                        self.dropped_to = max(self.dropped_to, step)
                except (ValueError, KeyError, TypeError):
                    continue  # a line cut short by a kill; the steps it belongs to are run again
            write_atomically(path, "".join(line + "\n" for line in kept).encode())
        self._file = open(path, "ab", buffering=0)  # a buffer would be written once more at the end

    def write(self, values: dict[str, Any]) -> None:
        line = (json.dumps(values) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunFailed(
                f"{self._path}: cannot be written ({error}); the newest checkpoint is intact"
            ) from None

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Wandb:
    """One W&B run, told from a thread of its own. Any failure is said once, and everything goes on without it."""

    def __init__(
        self,
        config: LoggerConfig,
        run_dir: Path,
        run_id: str,
        settings: dict[str, Any],
        folder: Path | None = None,
        hurried: bool = True,
    ) -> None:
        self._run: Any = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._run_dir, self._hurried = run_dir, hurried
        self._folder = folder or run_dir.parent  # of the wandb/ that holds this run
        self.has_failed = False
        if config.mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        mode: Any = config.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        try:
            self._start(mode, config, run_dir, run_id, settings)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # W&B raises its own kinds, pydantic's, and SystemExit
            if mode != "online":
                self._give_up(error)
                return
            print(
                f"warning: W&B cannot be reached ({_one_line(error)}); this run is offline", file=sys.stderr
            )
            try:
                self._wandb.teardown()  # its service still holds the run id
                self._start("offline", config, run_dir, run_id, settings)
            except (Exception, SystemExit) as second:
                self._give_up(second)

    def _start(
        self, mode: Any, config: LoggerConfig, run_dir: Path, run_id: str, settings: dict[str, Any]
    ) -> None:
        import wandb

        self._wandb = wandb
        run = wandb.init(
            project=config.project,
            dir=self._folder,
            id=run_id,
            name=run_dir.name,
            config=settings,
            group=config.group,
            tags=[tag[:64] for tag in config.tags],  # W&B takes no longer ones
            mode=mode,
            resume="allow",
            reinit="finish_previous",
            # its own record of the process has the command line, user and host name
            settings=wandb.Settings(init_timeout=10, console="off", x_disable_meta=True),
        )
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")
        self._run = run
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self._run is not None:
                    call()
            except BaseException as error:
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._run, self.has_failed = None, True
        print(
            f"warning: W&B is off for this run ({_one_line(error)}); metrics.jsonl has every number",
            file=sys.stderr,
        )

    def __enter__(self) -> Wandb:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if (run := self._run) is None:
            return
        self._calls.put(lambda: run.finish(exit_code=0 if kind is None else 1))
        self._calls.put(None)
        try:
            self._thread.join(PATIENCE if self._hurried else None)
        finally:
            if self._thread.is_alive():
                self._leave()

    def _leave(self) -> None:
        """Go on without a W&B that hangs. Its client would wait for it when Python ends, however long that takes."""
        self.has_failed = True
        print(
            "warning: W&B has not taken all of this run in time; make a whole one of it with: "
            f"python scripts/wandb_rebuild.py run={shlex.quote(str(self._run_dir))}",
            file=sys.stderr,
        )
        service = getattr(getattr(self._wandb.setup(), "_connection", None), "_proc", None)
        if process := getattr(service, "_process", None):
            process.kill()
            with suppress(Exception, SystemExit):
                self._wandb.teardown()

    def log(self, values: dict[str, Any]) -> None:
        """Log all metrics of one step; `values["step"]` must grow from call to call."""
        if self._run is not None:
            self._calls.put(lambda: self._run.log(values, step=values["step"]))

    def conclude(self, summary: dict[str, Any], shown: dict[str, tuple[str, str] | Path]) -> None:
        """Add numbers to the summary, and by name what is shown: samples (prompt, text) and pictures."""

        def write() -> None:
            for name, what in shown.items():
                if isinstance(what, Path):
                    self._run.log({name: self._wandb.Image(str(what))})
                else:
                    table = self._wandb.Table(columns=["prompt", "text"], data=[list(what)])
                    self._run.log({name: table})
            self._run.summary.update(summary)

        if self._run is not None:
            self._calls.put(write)


def log_evaluation(path: Path, metrics: dict[str, float], picture: Path) -> None:
    """Add an evaluation's numbers and picture to the W&B run of a run directory; nothing where it has none.

    An offline run gets a second folder with the same id, which `wandb sync` joins with the first.
    """
    run_id = run_dir.wandb_id(path)
    if not metrics or run_id is None:
        return
    with Wandb(run_dir.load_config(path).logger, path, run_id, {}) as wandb:
        wandb.conclude(metrics, {picture.stem: picture})


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _has_key() -> bool:
    """Whether `wandb login` or WANDB_API_KEY has left a key; looks at files only, asks nobody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
