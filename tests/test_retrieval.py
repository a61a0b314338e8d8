"""Retrieval finds what a model that sees so far can find, no more; and computes nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import TokenStream
from data.recall import CHANCE, Recall
from model.config import UserError
from model.evaluation import retrieval
from model.evaluation.kept import Kept
from model.load import Run
from tests.conftest import POSITIONS, VOCAB, compose_config, tiny_gpt, write_shards


class SeesBack(nn.Module):
    """Gives the pair of the key that a window asks for, if it is among the last `reach` tokens; else its first."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach, self.anchor = reach, nn.Parameter(torch.zeros(()))
        self.position = tiny_gpt(POSITIONS["none"]).position

    def hidden(self, ids_BT: Tensor) -> Tensor:
        recall, answers = Recall("bytes"), []
        for ids in ids_BT[:, -self.reach :].numpy():
            of_key = recall.pairs[recall.questions == ids[-1]][0]
            answers.append(next((i for i in ids.tolist() if i in of_key), of_key[0]))
        last = F.one_hot(torch.tensor(answers), VOCAB).float()
        return torch.cat((torch.zeros(*ids_BT.shape, VOCAB)[:, :-1], last[:, None]), 1)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    tokens = np.random.default_rng(0).integers(97, 123, size=5000)
    return TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")


def sweep(model: Any, stream: TokenStream, kept: Kept, batch_tokens: int = 4096) -> list[dict[str, Any]]:
    run = Run(compose_config("tokenizer=bytes"), model, 0, {})
    note = {"run": "a", "trained": 256, "taught": 0.5, "split": "val"}
    lengths = retrieval.evenly_spaced(1024)
    rows: Iterator[dict[str, Any]] = retrieval.sweep(
        run, stream, lengths, note, kept, batch_tokens, nullcontext
    )  # type: ignore[arg-type]
    return list(rows)


@pytest.mark.parametrize("reach", [300, 600, 2000])
def test_keys_are_found_as_far_as_the_model_sees(stream: TokenStream, tmp_path: Path, reach: int) -> None:
    rows = sweep(SeesBack(reach), stream, Kept(tmp_path / "e.json"))
    assert [row["length"] for row in rows] == list(range(32, 1025, 32))
    # the pair begins 8 tokens behind the start of the window
    seen = [row["length"] for row in rows if row["length"] - 8 <= reach]
    assert all(row["found"] == 1 for row in rows if row["length"] in seen)
    missed = [row["found"] for row in rows if row["length"] not in seen]
    assert not missed or np.mean(missed) == pytest.approx(CHANCE, abs=0.05)
    assert retrieval.effective_length(rows) == seen[-1]


def test_an_unbroken_row_counts_and_not_what_comes_after_a_gap() -> None:
    rows = [{"length": n, "found": found} for n, found in ((300, 1.0), (100, 0.2), (200, 0.19), (50, 1.0))]
    assert retrieval.effective_length(rows) == 100
    assert retrieval.effective_length([{"length": 50, "found": 0.1}]) == 0


def test_real_model_with_batches_of_any_size_and_nothing_twice(stream: TokenStream, tmp_path: Path) -> None:
    model = tiny_gpt(POSITIONS["alibi"])
    first, other = Kept(tmp_path / "first.json"), Kept(tmp_path / "other.json")
    rows = sweep(model, stream, first)
    assert rows == sweep(model, stream, other, batch_tokens=1)
    assert first.new == len(rows) == 32
    again = Kept(tmp_path / "first.json")
    assert sweep(SeesBack(1), stream, again) == rows and again.new == 0


def test_learned_positions_end_the_sweep(stream: TokenStream, tmp_path: Path) -> None:
    rows = sweep(tiny_gpt(POSITIONS["learned"], context_length=128), stream, Kept(tmp_path / "e.json"))
    assert [row["length"] for row in rows] == [32, 64, 96, 128, 160]
    assert rows[-1]["skipped"] == "not defined beyond 128"
    (line,) = retrieval.summary(rows)
    assert line["longest"] == 128 and line["chance"] == 1 / 16


def test_an_exam_needs_room() -> None:
    with pytest.raises(UserError, match="retrieval needs 17 tokens or more"):
        retrieval.evenly_spaced(16)


def test_exams_are_those_of_the_task(stream: TokenStream) -> None:
    recall, seen = Recall("bytes"), []

    class Looks(SeesBack):
        def hidden(self, ids_BT: Tensor) -> Tensor:
            seen.append(ids_BT)
            return super().hidden(ids_BT)

    retrieval.retrieve(Looks(9), stream, "bytes", 128)  # type: ignore[arg-type]
    windows = torch.cat(seen)
    assert windows.shape == (retrieval.TRIALS, 128) and np.isin(windows[:, -1], recall.questions).all()
    assert len({tuple(row) for row in windows.tolist()}) == retrieval.TRIALS
