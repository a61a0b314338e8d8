"""metrics.jsonl to one clean offline W&B run: `python scripts/wandb_rebuild.py run=runs/<run>`."""

from __future__ import annotations

import shutil
from typing import Any

from model import launch
from model.config import RunFailed, Strict, UserError, to_path, validate


class RebuildConfig(Strict):
    run: str


def main(values: dict[str, Any]) -> None:
    config = validate(RebuildConfig, values)
    path = to_path(config.run)
    from model.training import run_dir
    from model.training.metrics import Wandb

    run_config, run_id = run_dir.load_config(path), run_dir.wandb_id(path)
    rows = run_dir.metrics_rows(path)
    if run_id is None:
        raise UserError(f"{path}: run.json has no W&B id; give the directory of a run that train.py made")
    folder = path / "wandb_rebuilt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = run_config.model_dump(mode="json", exclude={"run_dir", "resume"})
    logger = run_config.logger.model_copy(update={"mode": "offline"})
    with Wandb(logger, path, run_id, settings, folder, hurried=False) as wandb:
        for row in rows:
            wandb.log(row)
        if rows:
            wandb.conclude({key: value for key, value in rows[-1].items() if key.startswith("val/")}, {})
    made = sorted(folder.glob("wandb/offline-run-*"))
    if not made or wandb.has_failed:
        raise RunFailed(f"{folder}: W&B has not written the run; its reason is above")
    print(f"{len(rows)} points. Upload them with: wandb sync {made[-1]}")


if __name__ == "__main__":
    launch.main("wandb_rebuild", main)
