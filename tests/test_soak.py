"""Trainings that are killed again and again end as if they had been left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/soak.py"), "kills=200", f"work={tmp_path / 'soak'}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    kills, trainings = re.findall(r"^(\d+) kills, (\d+) trainings as if", result.stdout, re.MULTILINE)[-1]
    assert int(kills) >= 200 and int(trainings) >= 5
    assert all(
        place in result.stdout for place in ("checkpoint", "metrics", "run_dir", "perplexity", "any time")
    )
