"""The training loop still gives the numbers that committed results were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import train
from data.loader import TokenStream
from data.prepare import prepare
from model.config import validate
from model.findings.work import FIRST_STEPS
from model.training import loop, run_dir
from model.training.config import RunConfig
from tests.conftest import ROOT, metrics


def recorded() -> list[Any]:
    """One result of each kind of training from scratch; the first is repeated always, the others by -m slow."""
    kinds: dict[str, dict[str, Any]] = {}
    for file in sorted(ROOT.glob("results/*/runs/*.json")):
        result = json.loads(file.read_text())
        config = result["config"]
        if result.get("first_losses") and config["model"]["original_length"] is None:
            kind = [config["position"]["_target_"].rpartition(".")[2], config["objective"], config["data"]["task"],
                    str(config["model"]["context_length"])]  # fmt: skip
            kinds.setdefault(" ".join(kind), result)
    return [
        pytest.param(result, id=kind, marks=[pytest.mark.slow] if i else [])
        for i, (kind, result) in enumerate(sorted(kinds.items()))
    ]


@pytest.mark.parametrize("result", recorded())
def test_first_steps_have_the_losses_on_record(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    advance = loop.Training._advance

    def until_enough(self: loop.Training) -> dict[str, Any]:
        if self.step == FIRST_STEPS:
            raise Enough
        return advance(self)

    monkeypatch.setattr(loop.Training, "_advance", until_enough)
    monkeypatch.chdir(tmp_path)
    config = validate(RunConfig, result["config"])
    folder, path = prepare(config.data, config.tokenizer.name), tmp_path / "run"
    path.mkdir()
    with run_dir.lock(path), pytest.raises(Enough):
        loader = train.make_loader(config, TokenStream(folder, "train"))
        train.train(config, path, loader, TokenStream(folder, "val"))
    losses = [[row["step"], row["train/loss"]] for row in metrics(path) if "train/loss" in row]
    assert [step for step, _ in losses] == [step for step, _ in result["first_losses"]]
    for (_, loss), (_, wanted) in zip(losses, result["first_losses"], strict=True):
        assert loss == pytest.approx(wanted, abs=0.02)  # machines differ in how they round bf16
