"""What is shown of a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.findings.page import claims_table, counted, findings_table
from model.findings.tables import tuning_tables


def rows(run: str, losses: dict[str, float | None], tokens: int | None = None) -> list[dict[str, object]]:
    return [
        {"run": run, "option": option, "tokens": tokens, "val_loss": loss} for option, loss in losses.items()
    ]


def test_tuning_has_a_line_per_run_a_table_per_set_of_options_and_tells_what_diverged() -> None:
    lines = tuning_tables(
        rows("rope", {"lr=1": 3.0, "lr=2": 2.5, "lr=4": None})
        + rows("none", {"lr=1": 3.5, "lr=2": 3.25, "lr=4": 3.125})
        + rows("tuned", {"lr=8": 1.0, "lr=9": 2.0})
        + rows("short", {"lr=8": 1.0, "lr=9": 0.5}, tokens=16384)
    )
    assert "| run | `lr=1` | `lr=2` | `lr=4` |" in lines and "| run | `lr=8` | `lr=9` |" in lines
    assert "| rope | 3.0000 | **2.5000** | diverged |" in lines
    assert "| none | 3.5000 | 3.2500 | **3.1250** |" in lines
    assert "| run, on the first 16,384 tokens | `lr=8` | `lr=9` |" in lines
    assert "| tuned | **1.0000** | 2.0000 |" in lines
    assert "Best at an end of what was tried: none, tuned, short." in lines[-1]


def claim(name: str, verdict: str, superseded_by: str | None = None) -> dict[str, Any]:
    said = {"sentence": "It holds", "source": "table 1", "threshold": "< 1", "statistic": "max(a|b)"}
    said |= {"superseded_by": superseded_by, "needs_scale": False}
    return {"id": name, "verdict": verdict, "mean": 0.5, "interval": [0.25, 0.75], **said}


def test_the_readme_counts_verdicts_and_has_each_claim_that_was_judged(tmp_path: Path) -> None:
    judged = [claim("A1", "reproduced"), claim("A2", "inconclusive"), claim("A3", "reproduced")]
    judged.append(claim("A4", "reproduced", superseded_by="A1"))
    for scale, claims in (("cpu", judged), ("smoke", [claim("A1", "not judged")])):
        (tmp_path / scale).mkdir()
        (tmp_path / scale / "alibi.json").write_text(json.dumps({"title": "Long", "claims": claims}))
    lines = findings_table(tmp_path).splitlines()
    assert "| [Long](results/cpu/alibi.md) | cpu | 2 | 0 | 1 |" in lines
    assert "| A2 It holds | 0.500 [0.250, 0.750] | < 1 | **inconclusive** |" in lines
    assert sum(line.startswith("| A") for line in lines) == 3
    assert "2 reproduced, 1 inconclusive, 1 superseded</summary>" in "\n".join(lines)
    assert counted([claim("A1", "not judged")]) == "1 not judged"


def test_a_claim_is_a_row_that_names_what_supersedes_it() -> None:
    row = claims_table([claim("A4", "not reproduced", superseded_by="A1")])[-1]
    wanted = "`max(a\\|b)` | < 1 | 0.500 [0.250, 0.750] | **not reproduced**; see A1 |"
    assert row == f"| **A4** It holds (table 1) | {wanted}"
