"""How far a sweep is: `python scripts/sweep_status.py`; --help lists the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

from model import launch, sweep
from model.config import Strict, UserError, to_path, validate


class StatusConfig(Strict):
    sweep: str | None


def main(values: dict[str, Any]) -> None:
    config = validate(StatusConfig, values)
    folders = sorted(path.parent for path in sweep.WHERE.glob(f"*/{sweep.PLAN}"))
    if config.sweep is None and not folders:
        raise UserError(
            f"{sweep.WHERE}: holds no sweep; start one with: python train.py -m position=none,rope"
        )
    folder = folders[-1] if config.sweep is None else to_path(config.sweep)
    rows, states = [], Counter[str]()
    for label, job in sweep.jobs(folder):
        known, state = job.read(), job.state()
        states[state] += 1
        loss = (known.get("row") or {}).get("val loss")
        rows.append(
            {"job": job.number, "overrides": label, "state": state, "val loss": loss}
            | {"run": known.get("run"), "error": known.get("error")}
        )
    launch.print_table(rows, title=f"{folder}: {', '.join(f'{n} {state}' for state, n in states.items())}")
    if states.total() > states["done"] + states["running"]:
        print(f"Finish it with: {sweep.command_to_finish(folder)}")


if __name__ == "__main__":
    launch.main("sweep_status", main)
