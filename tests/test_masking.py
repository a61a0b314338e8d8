"""Masked language models: what is masked, what is told, and that a run of it is a run like any other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from data.loader import TokenStream
from data.masking import IGNORED, VALIDATION_SEED, Masking, examples
from model.config import UserError
from model.load import build_model, load_run
from scripts import evaluate as evaluate_script
from scripts import sample as sample_script
from tests.conftest import CONTEXT, POSITIONS, ROOT, TINY, VOCAB, compose_config, evaluate, tiny_gpt
from tests.test_training import final, metrics

Train = Callable[..., Path]


def test_15_percent_are_told_of_which_80_masked_10_random_and_10_left() -> None:
    tokens = np.random.default_rng(0).integers(VOCAB, size=(200, 1001))
    inputs, targets = examples(tokens, np.arange(200), Masking(VOCAB, seed=3))
    told = targets != IGNORED
    assert inputs.shape == targets.shape == (200, 1000) and (told.sum(1) == 150).all()
    assert (targets[told] == tokens[:, :-1][told]).all() and (inputs[~told] == tokens[:, :-1][~told]).all()
    masked, left = (inputs == VOCAB)[told].mean(), (inputs == targets)[told].mean()
    # three standard deviations of 30,000 draws; one random token in VOCAB is the one that was there
    assert masked == pytest.approx(0.8, abs=0.007)
    assert left == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.006)
    random = inputs[told & (inputs != VOCAB) & (inputs != targets)]
    assert len(np.unique(random)) > VOCAB - 5 and random.mean() == pytest.approx((VOCAB - 1) / 2, rel=0.03)


def test_every_place_of_a_window_is_told_as_often() -> None:
    tokens = np.zeros((2000, 41), dtype=np.int64)
    told = examples(tokens, np.arange(2000), Masking(VOCAB, seed=0))[1] != IGNORED
    assert (np.abs(told.mean(0) - 0.15) < 4.5 * math.sqrt(0.15 * 0.85 / 2000)).all()
    assert (examples(tokens[:, :2], np.arange(2000), Masking(VOCAB, 0))[1] != IGNORED).sum(1).tolist() == [
        1
    ] * 2000


def test_masks_depend_on_seed_and_number_alone() -> None:
    tokens = np.random.default_rng(0).integers(VOCAB, size=(6, CONTEXT + 1))
    numbers, masking = np.array([5, 0, 7, 2**40, 3, 1]), Masking(VOCAB, seed=1)
    inputs, targets = examples(tokens, numbers, masking)
    backwards = examples(tokens[::-1], numbers[::-1], masking)
    assert (backwards[0] == inputs[::-1]).all() and (backwards[1] == targets[::-1]).all()
    # as floats the large ones would be one number
    seeds = (1, 2, VALIDATION_SEED - 1, VALIDATION_SEED, VALIDATION_SEED + 1)
    drawn = [examples(tokens, numbers, Masking(VOCAB, seed))[1] for seed in seeds]
    assert all((a != b).any() for i, a in enumerate(drawn) for b in drawn[:i]) and (drawn[0] == targets).all()
    assert len({tuple(examples(tokens[:1], np.array([n]), masking)[1][0]) for n in range(20)}) == 20


@pytest.mark.parametrize("name", POSITIONS)
def test_masked_slots_are_told_apart_by_position_alone(name: str) -> None:
    """Without positions and with both sides in view they are one: Haviv et al. 2022, table 4, where NoPE fails."""
    model = tiny_gpt(POSITIONS[name], n_layer=4, causal=False).double()
    mask_token = VOCAB - 1
    inputs, _ = examples(np.random.default_rng(1).integers(mask_token, size=(3, CONTEXT + 1)), np.arange(3),
                         Masking(mask_token, seed=0))  # fmt: skip
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs))
    for ids, logits_TV in zip(inputs, logits, strict=True):
        slots = logits_TV[ids == mask_token]
        difference = (slots - slots[0]).abs().max()
        assert len(slots) >= 3 and (difference < 1e-12 if name == "none" else difference > 1e-3)


def test_loss_is_the_mean_over_the_selected_tokens_of_each_step(train_tiny: Train, shards: Path) -> None:
    """At a learning rate of next to nothing, so that the model of every step is the one that it starts with."""
    still = ["optim=adamw", "optim.lr=1e-9", "train.steps=3", "train.log_interval=1"]
    path = train_tiny("objective=mlm", "train.micro_batch_size=2", *still)
    config = load_run(path).config
    loader, model = train.make_loader(config, TokenStream(shards, "train")), build_model(config)
    for step in range(3):
        numbers = np.arange(4 * step, 4 * step + 4)
        inputs, targets = examples(loader.batch(step), numbers, Masking(VOCAB, config.seed))
        with torch.no_grad():
            logits = model(torch.from_numpy(inputs))
        told = torch.from_numpy(targets != IGNORED)
        expected = float(F.cross_entropy(logits[told], torch.from_numpy(targets)[told]))
        assert metrics(path)[step]["train/loss"] == pytest.approx(expected, rel=1e-5)
        assert expected == pytest.approx(math.log(VOCAB + 1), rel=0.05)


def test_mlm_learns_and_its_run_loads_as_it_was(
    train_tiny: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text is words of eight kinds, of which a masked letter is mostly known from both sides."""
    path = train_tiny("objective=mlm", "train.steps=150", "position=t5")
    said = capsys.readouterr().out
    assert "masked tokens from both sides (model.causal=false)" in said
    assert "resume=" in said and "scripts/" not in said and "Sample" not in said
    stored = yaml.safe_load((path / "config.yaml").read_text())
    assert stored["objective"] == "mlm" and stored["model"]["causal"] is False
    last = metrics(path)[-1]
    assert last["val/loss"] < 2.3
    config, model, *_ = load_run(path)
    assert config.objective == "mlm" and not model.config.causal and model.vocab_size == VOCAB + 1
    assert all(torch.equal(weight, final(path)["model"][name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("seed", [0, 7])
def test_runs_of_every_seed_are_validated_on_the_same_masks(
    train_tiny: Train, shards: Path, seed: int
) -> None:
    path = train_tiny("objective=mlm", "train.steps=2", f"seed={seed}")
    score = evaluate(load_run(path).model, TokenStream(shards, "val"), CONTEXT, masking=Masking(VOCAB, 2**63))
    assert metrics(path)[-1]["val/loss"] == pytest.approx(score.loss, rel=1e-6)


def test_validation_depends_neither_on_batch_size_nor_on_torch(shards: Path) -> None:
    (shards / "meta.json").write_text(json.dumps({"bytes_per_token": [1] * 256 + [0]}))
    model = build_model(compose_config(*TINY, "data.path=x", "objective=mlm"))
    stream, masking, scores = TokenStream(shards, "val"), Masking(VOCAB, VALIDATION_SEED), []
    for batch in (1, 3, 8):
        torch.manual_seed(batch)
        done: list[tuple[int, int]] = []
        options: dict[str, Any] = {"on_batch": lambda *progress, done=done: done.append(progress)}
        scores.append(
            evaluate(model, stream, CONTEXT, batch_tokens=batch * CONTEXT, masking=masking, **options)
        )
        assert done[-1] == (999, 999)
    # 31 windows of 32 tokens and one of 7
    assert [score.tokens for score in scores] == [31 * 5 + 1] * 3
    assert len({round(score.loss, 5) for score in scores}) == 1
    assert evaluate(model, stream, CONTEXT, masking=Masking(VOCAB, 1)).loss != scores[0].loss
    assert scores[0].bits_per_byte is None and evaluate(model, stream, CONTEXT).bits_per_byte is not None


def script_values(command: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(compose(command, overrides=list(overrides)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def test_what_needs_a_next_token_refuses_in_a_sentence(train_tiny: Train, shards: Path) -> None:
    run = f"run={train_tiny('objective=mlm', 'train.steps=1')}"
    for cache in ("true", "false"):
        with pytest.raises(UserError, match=r"objective=mlm tells masked tokens and continues no text"):
            sample_script.main(script_values("sample", run, "prompt=In", f"cache={cache}"))
    with pytest.raises(UserError, match=r"objective=mlm has no loss of next tokens; .* is val/loss"):
        evaluate_script.main(script_values("evaluate", run, "attention=true"))


def test_objective_decides_what_attention_sees() -> None:
    assert compose_config().model.causal and not compose_config("objective=mlm").model.causal
    assert not compose_config("objective=mlm", "+model.causal=true").model.causal
    with pytest.raises(UserError, match="model.causal=false would see the tokens .* or objective=mlm"):
        compose_config("+model.causal=false")


def test_weights_of_the_other_objective_are_refused(train_tiny: Train) -> None:
    parent = train_tiny("train.steps=1", name="parent")
    with pytest.raises(UserError, match=r"embedding.weight is \(257, 32\) there and \(258, 32\) here"):
        train_tiny("objective=mlm", f"init_from={parent}", name="child")
