"""What nobody would type, and files that nobody would write: a sentence or a result, never a traceback or a hang."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data.loader import TokenStream
from model import launch
from model.config import UserError, flat_keys, validate
from model.generate import Sampling, generate
from model.load import build_model, check_buildable
from model.training import checkpoint, run_dir
from model.training.config import RunConfig
from tests.conftest import CONTEXT, POSITIONS, Train, compose_config, tiny_gpt, write_shards

pytestmark = pytest.mark.slow
UNLIMITED = {
    "deadline": 20_000,
    "derandomize": True,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
KEYS = [
    key for key in flat_keys(compose_config().model_dump()) if key not in {"run_dir", "resume", "init_from"}
]
GROUPS = ["position", "position/scaling", "model", "optim", "data", "tokenizer", "logger"]
odd_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
long_text = st.sampled_from(["a", "é", "🙂", "[", "(", "\\", "'", "${", "1"]).map(lambda piece: piece * 5000)
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1e3, 2**31, 2**63, 10**30])).map(str)
structures = st.sampled_from(
    ["null", "[1,2]", "{a:1}", "${seed}", "${oc.env:HOME}", "${nothing}", "true", "", "''"]
)
values = st.one_of(odd_text, numbers, structures, long_text)
overrides = st.one_of(
    st.tuples(st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS + GROUPS), values).map(
        lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"
    ),
    st.tuples(odd_text, values).map("=".join),
    odd_text,
).filter(lambda argument: not argument.startswith("-") and "hydra" not in argument)


@settings(max_examples=1000, **UNLIMITED)
@given(arguments=st.lists(overrides, min_size=1, max_size=3))
def test_overrides_are_taken_or_refused_with_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    def task(configured: dict[str, Any]) -> None:
        config = validate(RunConfig, configured)
        check_buildable(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        launch.fresh()
        try:
            launch.main("config", task)
        except SystemExit as end:
            assert end.code in {0, 2}, arguments
    assert list(tmp_path.iterdir()) == []  # nothing is written before the configuration is known to be right


def changed(content: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """`content` with some bytes replaced by others: (where, how many, by what)."""
    for where, count, by in edits:
        place = where % (len(content) + 1)
        content = content[:place] + by + content[place + count :]
    return content


edits = st.lists(
    st.tuples(st.integers(0, 2**20), st.sampled_from([0, 1, 1, 8, 10**6]), st.binary(max_size=8)),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = write_shards(tmp_path_factory.mktemp("shards"), [i % 250 for i in range(900)], [1] * 200)
    return folder, (folder / "train-00000.bin").read_bytes()


@settings(max_examples=600, **UNLIMITED)
@given(edits=edits, near_the_header=st.booleans())
def test_shards_are_read_or_refused(shard: tuple[Path, bytes], edits: Any, near_the_header: bool) -> None:
    folder, content = shard
    if near_the_header:
        edits = [(where % 400, count, by) for where, count, by in edits]
    (folder / "train-00000.bin").write_bytes(changed(content, edits))
    try:
        stream = TokenStream(folder, "train")
        stream.check_fits("bytes", CONTEXT)
        assert len(stream.read(0, len(stream))) == len(stream)
        stream.documents(256)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.fixture
def saved(train_tiny: Train) -> tuple[Path, bytes]:
    path = train_tiny("train.steps=2", "train.keep=1")
    file = checkpoint.newest_first(path)[0]
    return file, file.read_bytes()


@settings(max_examples=300, **UNLIMITED)
@given(edits=edits)
def test_checkpoints_are_loaded_whole_or_refused(saved: tuple[Path, bytes], edits: Any) -> None:
    file, content = saved
    file.write_bytes(content)
    good = checkpoint.read(file)["model"]
    file.write_bytes(changed(content, edits))
    try:
        state = checkpoint.read(file)
        checkpoint.check_weights(build_model(run_dir.load_config(file.parent.parent)), state, file)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert all(torch.equal(state["model"][name], good[name]) for name in good)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), odd_text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(odd_text, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=400, **UNLIMITED)
@given(
    key=st.sampled_from([*KEYS, "position", "position._target_", "model", "data"]), value=plain, text=odd_text
)
def test_stored_configurations_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any, text: str
) -> None:
    stored = compose_config().model_dump(mode="json")
    target, parts = stored, key.split(".")
    for part in parts[:-1]:
        target = target[part]
    target[parts[-1]] = value
    folder = tmp_path_factory.getbasetemp() / "stored"
    folder.mkdir(exist_ok=True)
    for content in (yaml.safe_dump(stored), text):
        (folder / "config.yaml").write_text(content, encoding="utf-8")
        try:
            check_buildable(run_dir.load_config(folder))
        except UserError as error:
            assert "\n" not in str(error)


MODELS = {name: tiny_gpt(POSITIONS[name], n_layer=1) for name in ("rope", "learned", "alibi")}


@settings(max_examples=500, **UNLIMITED)
@given(
    name=st.sampled_from(sorted(MODELS)),
    prompts=st.lists(st.lists(st.integers(-2, 300), max_size=CONTEXT + 8), max_size=3),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.integers(-1, 6),
            "temperature": st.one_of(st.floats(), st.sampled_from([0, 1e-300, 1e300, 5e-324])),
            "top_k": st.one_of(st.none(), st.integers(-1, 2**40)),
            "top_p": st.one_of(st.floats(), st.sampled_from([0, 1, 1e-300, 1 - 1e-16])),
            "seed": st.one_of(st.integers(), st.text(max_size=3)),
            "overflow": st.sampled_from(["extend", "slide", "other"]),
            "cache": st.booleans(),
        },
    ),
)
def test_samplers_give_tokens_or_a_sentence(
    name: str, prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    try:
        checked = validate(Sampling, sampling)
        steps = list(generate(MODELS[name], prompts, checked))
    except UserError as error:
        assert "\n" not in str(error)
        return
    rows = [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]
    assert all(len(row) == checked.max_new_tokens and all(0 <= token < 257 for token in row) for row in rows)
