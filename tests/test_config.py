"""Every option of every group composes and builds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from data import tokenizer
from model.config import UserError, nearest
from model.load import build_model
from tests.conftest import ROOT, compose_config

OPTIONS = sorted(
    path.relative_to(ROOT / "conf")
    for path in (ROOT / "conf").glob("*/*.yaml")
    if path.parent.name not in {"finding", "scale"}  # not of a training
)
NEED_PATH = {Path("data/text.yaml"), Path("data/bin.yaml")}
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_composes_and_builds(option: Path) -> None:
    config = compose_config(
        f"{option.parent}={option.stem}", *(["data.path=x"] if option in NEED_PATH else [])
    )
    with torch.device("meta"):
        model = build_model(config)
    assert model.vocab_size == tokenizer.vocab_size(config.tokenizer.name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_gpt2_sizes_are_the_published_ones(name: str) -> None:
    config = compose_config(f"model={name}", "position=learned")
    assert (config.tokenizer.name, config.model.context_length) == ("gpt2", 1024)
    with torch.device("meta"):
        assert build_model(config).parameter_count() == PUBLISHED[name]


def test_tokenizer_given_on_the_command_line_wins_over_the_models() -> None:
    assert compose_config("model=gpt2", "tokenizer=bytes").tokenizer.name == "bytes"


def test_flops_per_token_follow_the_palm_formula() -> None:
    config = compose_config("model=gpt2", "position=learned")
    with torch.device("meta"):
        model = build_model(config)
    n = 124_439_808 - 1024 * 768
    assert model.flops_per_token(1024) == 6 * n + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(("wrong", "says"), [
    ("lrr", "; did you mean optim.lr?"),
    ("optim.lrr", "; did you mean optim.lr?"),
    ("train.factor", "; valid: optim.lr, train.steps"),
])  # fmt: skip
def test_nearest_names(wrong: str, says: str) -> None:
    assert nearest(wrong, ["train.steps", "optim.lr"]) == says


def test_same_seed_builds_the_same_model_and_another_seed_another() -> None:
    weights = [build_model(compose_config(f"seed={seed}")).embedding.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert math.isclose(weights[0].std().item(), 0.02, rel_tol=0.02)


def test_infinite_and_missing_values_are_refused() -> None:
    with pytest.raises(UserError, match="optim.lr=inf: expected a finite number"):
        compose_config("optim.lr=inf")


@pytest.mark.parametrize("command", ["config", "sample", "evaluate", "plot", "benchmark", "prepare"])
def test_defaults_in_the_help_are_the_real_ones(command: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(command, overrides=["name=test"] if command == "config" else [])
    template = yaml.safe_load((ROOT / f"conf/{command}.yaml").read_text())["hydra"]["help"]["template"]
    keys = template[template.index("eys (key=value") :]
    shown = re.findall(r"([\w.]+)=([\w./-]+|\"\")(?=\s|$)", keys)
    assert len(shown) >= 2
    for key, value in shown:
        if not OmegaConf.is_missing(cfg, key):
            actual = OmegaConf.select(cfg, key)
            assert actual == (float(value) if isinstance(actual, float) else yaml.safe_load(value)), key
