"""Copy and reverse: what a window holds, and what counts as exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import TokenStream
from data.synthetic import Copy, Reverse, longest
from data.tasks import TaskStream
from model.evaluation.exact_match import TRIALS, exact_match
from model.load import load_run
from tests.conftest import VOCAB, evaluate, write_shards
from tests.test_training import metrics

TEXT = np.full(44, ord(" "))


@pytest.mark.parametrize("task", [Copy, Reverse])
def test_a_window_is_a_word_its_answer_and_the_end(task: type[Copy]) -> None:
    lengths = set()
    for seed in range(400):
        window = bytes(t if t < 256 else 10 for t in task("bytes").lesson(TEXT, np.random.default_rng(seed)))
        word, _, answer = window.rstrip(b"\n").partition(b"#")
        assert len(window) == 44 and window.endswith(b"\n") and word.islower() and word.isalpha()
        assert answer == (word if task is Copy else word[::-1])
        lengths.add(len(word))
    assert lengths == set(range(1, 22)) and longest(44) == 21
    exam = task("bytes").exam(42, np.random.default_rng(0))
    assert len(exam) == 86 and exam[42] == ord("#") and exam[-1] == 256


class Copier(nn.Module):
    """Copies the word before the mark, with a mistake in the middle of words longer than `reach`."""

    def __init__(self, reach: int, backwards: bool = False) -> None:
        super().__init__()
        self.reach, self.backwards, self.anchor = reach, backwards, nn.Parameter(torch.zeros(()))

    def hidden(self, ids_BT: Tensor) -> Tensor:
        rows = []
        for row in ids_BT.tolist():
            n = row.index(ord("#"))
            word = row[:n][::-1] if self.backwards else row[:n]
            answer = [*word, 256]
            if n > self.reach:
                answer[n // 2] = ord("#")
            rows.append([0] * n + answer)
        return F.one_hot(torch.tensor(rows), VOCAB).float()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


def test_one_wrong_token_is_a_mistake() -> None:
    copier = Copier(reach=10)
    assert exact_match(copier, "copy", "bytes", 10) == 1  # type: ignore[arg-type]
    assert exact_match(copier, "copy", "bytes", 11) == 0  # type: ignore[arg-type]
    assert exact_match(copier, "reverse", "bytes", 10) == 0  # type: ignore[arg-type]
    assert exact_match(Copier(10, backwards=True), "reverse", "bytes", 10) == 1  # type: ignore[arg-type]


def test_words_of_a_length_differ() -> None:
    seen: list[Tensor] = []

    class Looks(Copier):
        def hidden(self, ids_BT: Tensor) -> Tensor:
            seen.append(ids_BT)
            return super().hidden(ids_BT)

    exact_match(Looks(9), "copy", "bytes", 8)  # type: ignore[arg-type]
    assert len({tuple(row) for row in seen[0].tolist()}) == TRIALS


def test_validation_is_of_the_task_where_nothing_else_is_trained(
    tmp_path: Path, train_tiny: Callable[..., Path]
) -> None:
    stream = TokenStream(write_shards(tmp_path / "v", [32] * 500, [32] * 500), "val")
    task = TaskStream(stream, "copy", "bytes")
    window = task.read(33, 33)
    assert ord("#") in window and np.array_equal(window, task.read(33, 33))
    assert len(task) == 500 and task.fingerprint() == stream.fingerprint()
    path = train_tiny("data.task=copy", "train.steps=5", name="task")
    run = load_run(path)
    val = TokenStream(path.parent.parent / "shards", "val")
    wanted = evaluate(run.model, TaskStream(val, "copy", "bytes"), 32)
    assert metrics(path)[-1]["val/loss"] == pytest.approx(wanted.loss, abs=1e-5)
    assert "val/bits_per_byte" not in metrics(path)[-1]
    on_text = evaluate(run.model, val, 32)
    assert abs(on_text.loss - wanted.loss) > 0.1
