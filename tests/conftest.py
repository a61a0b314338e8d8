"""What tests share: tiny shapes, every position YAML, small shards, and trainings in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from data.loader import TokenStream
from data.writer import write_shard
from model.config import Dims, GPTConfig, validate
from model.evaluation.perplexity import Score, score
from model.evaluation.windows import stream_windows
from model.gpt import GPT
from model.position import PositionEncoding, build
from model.training import checkpoint, run_dir
from model.training.config import RunConfig

Train = Callable[..., Path]
ROOT = Path(__file__).resolve().parent.parent


def read_options(folder: str) -> dict[str, dict[str, Any]]:
    """The options of a config group by name, as they are without their defaults list."""
    found = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / folder).glob("*.yaml"))}
    return {name: {k: v for k, v in values.items() if k != "defaults"} for name, values in found.items()}


POSITIONS = read_options("conf/position")
CONTEXT = 32
VOCAB = 257


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits for the first


def tiny_config(**changes: Any) -> GPTConfig:
    return GPTConfig(**{"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": CONTEXT, **changes})


def dims(n_embd: int, n_head: int, context_length: int, original_length: int | None = None) -> Dims:
    return tiny_config(
        n_embd=n_embd, n_head=n_head, context_length=context_length, original_length=original_length
    ).dims


def tiny_gpt(position: dict[str, Any], **changes: Any) -> GPT:
    """Random weights, large enough that attention is far from uniform: a trained tiny model hides errors."""
    config = tiny_config(**changes)
    model = GPT(config, VOCAB, build(position, config.dims)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
            block.attn.proj.weight.mul_(20)
    return model


def encoding(name: str, dims: Dims | None = None, **arguments: Any) -> PositionEncoding:
    return build(POSITIONS[name] | arguments, dims or tiny_config().dims)


def write_shards(
    folder: Path, train: Any, val: Any, tokenizer: str = "bytes", vocab_size: int = VOCAB
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in {"train": train, "val": val}.items():
        write_shard(
            folder / f"{split}-00000.bin",
            np.asarray(tokens),
            tokenizer=tokenizer,
            tokenizer_hash="test",
            vocab_size=vocab_size,
        )
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Text-like bytes: 20,000 to train on, 1,000 held out."""
    generator = np.random.default_rng(0)
    words = [b"in ", b"the ", b"beginning ", b"God ", b"created ", b"heaven ", b"and ", b"earth. "]
    tokens = np.frombuffer(b"".join(words[i] for i in generator.integers(8, size=6000)), dtype=np.uint8)
    return write_shards(tmp_path / "shards", tokens[:20_000], tokens[20_000:21_000])


TINY = [
    "data=bin",
    "tokenizer=bytes",
    "model.n_layer=2",
    "model.n_embd=32",
    f"model.context_length={CONTEXT}",
    "train.batch_size=4",
    "train.precision=fp32",
    "train.device=cpu",
    "logger.mode=disabled",
]


def compose_config(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=["name=test", *overrides])
    values = OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    return validate(RunConfig, {str(key): value for key, value in values.items()})


@pytest.fixture
def train_tiny(tmp_path: Path, shards: Path) -> Callable[..., Path]:
    """Train a tiny model in this process; returns its run directory. Called again, it resumes there."""

    def run(*overrides: str, name: str = "run") -> Path:
        config = compose_config(*TINY, f"data.path={shards}", *overrides)
        path = tmp_path / "runs" / name
        path.mkdir(parents=True, exist_ok=True)
        with run_dir.lock(path):
            loader = train.make_loader(config, TokenStream(shards, "train"))
            train.train(config, path, loader, TokenStream(shards, "val"))
        return path

    return run


def evaluate(
    model: GPT, stream: TokenStream, length: int, *, max_tokens: int | None = None, **options: Any
) -> Score:
    """Score `stream` in back-to-back windows of `length` tokens, as a validation of training does."""
    return score(model, stream, stream_windows(len(stream), length, max_tokens), **options)


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the speeds, which no two runs share."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


def final(path: Path) -> dict[str, Any]:
    return checkpoint.read(checkpoint.newest_first(path)[0])


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimizer and random states, and every line of metrics but the speeds, bit for bit."""
    assert_same(final(a), final(b))
    assert metrics(a) == metrics(b)
