"""What the README says is executed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_adding_an_encoding_takes_the_class_and_the_yaml_of_the_readme(tmp_path: Path) -> None:
    for name in ("model", "data", "conf", "tests", "train.py", "pyproject.toml"):
        source, target = ROOT / name, tmp_path / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    for language in ("python", "yaml"):
        block = re.search(rf"```{language}\n# (\S+)\n(.*?)```", README, re.DOTALL)
        assert block is not None
        (tmp_path / block[1]).write_text(block[2])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/position", "-k", "kerple"]
    contract = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert contract.returncode == 0, contract.stdout
    assert re.search(r"\b1[1-9] passed", contract.stdout)
    tiny = [
        "model.n_embd=32",
        "model.n_layer=2",
        "train.steps=3",
        "train.batch_size=2",
        "train.eval_tokens=500",
    ]
    training = [sys.executable, "train.py", "position=kerple", "position.a=2", "logger.mode=disabled", *tiny]
    trained = subprocess.run(training, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert trained.returncode == 0, trained.stderr
    wrong = subprocess.run(
        [*training, "position.a=x"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert wrong.returncode == 2 and "position.a=x: expected a valid number" in wrong.stderr
    (tmp_path / "conf/position/kerple.yaml").write_text("_target_: model.position.kerple.Kerple\na: 1.0: 2\n")
    no_yaml = subprocess.run(training, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert no_yaml.returncode == 2 and "Traceback" not in no_yaml.stderr
    assert re.search(r"error: mapping values are not allowed here .*kerple.yaml\", line 2", no_yaml.stderr)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:model|data|conf|scripts|tests)/[\w/.]*)`", README)))
)
def test_paths_in_the_readme_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_option_of_a_position_is_in_the_table() -> None:
    assert all(f"| `{path.stem}` |" in README for path in (ROOT / "conf/position").glob("*.yaml"))


COMMANDS = re.findall(r"^python ((?:train|scripts/\w+)\.py .*?)(?:\s+#.*)?$", README, re.MULTILINE)


def test_daily_commands_are_found() -> None:
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("command", COMMANDS)
def test_daily_commands_compose(command: str, tmp_path: Path) -> None:
    """Hydra takes each one; test_cli runs the same commands at a tiny size."""
    script, *arguments = shlex.split(re.sub(r"-m |--help", "", command))
    arguments = [re.sub(r"^((?:position|seed)=[^,]*),.*", r"\1", argument) for argument in arguments]
    keys = [argument for argument in arguments if "=" in argument]
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *keys, "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
