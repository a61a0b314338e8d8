"""The command from end to end at the smallest scale, and what it publishes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from model.findings.page import BEGIN, END, findings_table
from model.findings.spec import FINDINGS, read_finding
from tests.conftest import ROOT
from tests.test_cli import ENVIRONMENT

COMMAND = [sys.executable, str(ROOT / "scripts/reproduce.py")]


def reproduce(cwd: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stdout + result.stderr
    return result


def numbers(place: Path) -> dict[str, Any]:
    files = sorted((place / "results/smoke/runs").glob("*.json"))
    results = {file.stem: json.loads(file.read_text()) for file in files}
    repeatable = {
        key: {name: values for name, values in result["measures"].items() if not name.startswith("speed")}
        for key, result in results.items()
    }
    return {key: (result.get("curve"), repeatable[key]) for key, result in results.items()}


def check_pages(done: Path) -> None:
    """Each finding has its page, JSON and figures."""
    for name in FINDINGS:
        finding = read_finding(name)
        content = json.loads((done / f"results/smoke/{name}.json").read_text())
        judged = {claim["id"]: claim["superseded_by"] for claim in content["claims"]}
        assert judged.keys() | set(content["left_out"]) == {claim.id for claim in finding.claims}
        assert judged.keys() >= {claim.id for claim in finding.claims if not claim.superseded_by}
        for claim in content["claims"]:
            assert claim["verdict"] == "not judged" and claim["mean"] == claim["values"][0]
            assert {"sentence", "source", "statistic", "threshold", "seeds", "interval"} <= claim.keys()
        page = (done / f"results/smoke/{name}.md").read_text()
        for figure in re.findall(r"!\[.*?\]\((.*?)\)", page):
            assert "<svg" in (done / "results/smoke" / figure).read_text()
        assert content["command"] in page and finding.title in page
        known = set(finding.runs) - finding.superseded_runs()
        assert page.count("](figures/") == sum(
            not known.isdisjoint(figure.runs) for figure in finding.figures
        )


def test_findings_leave_their_pages_and_nothing_is_run_twice_even_without_the_checkpoints(
    tmp_path: Path,
) -> None:
    done = tmp_path
    reproduce(done)
    check_pages(done)
    before = {file: file.read_bytes() for file in (done / "results").rglob("*") if file.is_file()}
    (done / "runs/reproduce").rename(done / "runs/gone")
    began = time.monotonic()
    reproduce(done)
    assert time.monotonic() - began < 30
    assert {file: file.read_bytes() for file in (done / "results").rglob("*") if file.is_file()} == before
    assert not (done / "runs/reproduce").exists()


@pytest.mark.parametrize(("arguments", "says"), [
    (["finding=nop"], "finding=nop: no such option; did you mean nope?"),
    (["scale=cup"], "scale=cup: no such option; did you mean cpu?"),
    (["finding=nope", "scale.seeds=[5]"], "scale.seeds: other numbers than smoke's need a folder of their own"),
    (["finding=nope", "scale.lenght=5"], "scale.lenght: unknown key; did you mean scale.length?"),
])  # fmt: skip
def test_mistakes(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in reproduce(tmp_path, *arguments, code=2).stderr


@pytest.mark.slow
def test_killed_at_any_instant_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for place in (killed, undisturbed):
        place.mkdir()
    reproduce(undisturbed)
    for seconds in (3, 6, 8, 10, 12, 15):
        process = subprocess.Popen(
            COMMAND, cwd=killed, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL if seconds % 2 else signal.SIGTERM)
        process.wait()
    reproduce(killed)
    assert numbers(killed) == numbers(undisturbed)


def test_readme_has_the_findings_as_they_were_judged() -> None:
    inside = re.search(f"{BEGIN}\n(.*?)\n{END}", (ROOT / "README.md").read_text(), re.DOTALL)
    assert inside is not None and inside[1] == findings_table(ROOT / "results")
