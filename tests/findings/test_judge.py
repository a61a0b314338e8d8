"""Statistics, intervals and verdicts, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from model.config import UserError, validate
from model.findings.judge import decide, interval, text, threshold, value
from model.findings.spec import FINDINGS, Claim, Finding, Measure, RunSpec, Scale, read_finding
from tests.conftest import ROOT

KNOWN = {
    "a.ppl@1L": 20.0,
    "a.ppl@2L": 19.0,
    "a.ppl@4L": 22.0,
    "b.loss": 3.0,
    "c.loss": None,
    "diverged.failed": 1.0,
}


def test_a_scale_has_different_seeds() -> None:
    scale = yaml.safe_load((ROOT / "conf/scale/smoke.yaml").read_text())
    for seeds, says in (([1, 1], "the same seed twice"), ([], "scale.seeds=")):
        with pytest.raises(UserError, match=says):
            validate(Scale, scale | {"seeds": seeds}, prefix="scale.")


def claim(**changes: Any) -> Claim:
    values = {"id": "X", "sentence": "s", "source": "t", "statistic": {"ratio": ["a.x", "b.x"]}, "why": "w"}
    return validate(Claim, values | changes)


@pytest.mark.parametrize(("statistic", "wanted", "written"), [
    ({"ratio": ["a.ppl@2L", "a.ppl@1L"]}, 0.95, "a.ppl@2L / a.ppl@1L"),
    ({"difference": ["a.ppl@1L", "b.loss"]}, 17.0, "a.ppl@1L - b.loss"),
    ({"ratio": [{"max": ["a.ppl@2L", "a.ppl@4L"]}, "a.ppl@1L"]}, 1.1, "max(a.ppl@2L, a.ppl@4L) / a.ppl@1L"),
    ({"difference": [{"min": ["a.ppl@1L", "a.ppl@2L"]}, {"mean": ["a.ppl@1L", 30]}]}, -6.0,
     "min(a.ppl@1L, a.ppl@2L) - mean(a.ppl@1L, 30)"),
    ({"difference": [{"difference": ["a.ppl@4L", "a.ppl@1L"]}, {"difference": ["a.ppl@1L", "a.ppl@2L"]}]}, 1.0,
     "(a.ppl@4L - a.ppl@1L) - (a.ppl@1L - a.ppl@2L)"),
    ({"undefined": "c.loss"}, 1.0, "undefined(c.loss)"),
    ({"undefined": "b.loss"}, 0.0, "undefined(b.loss)"),
    ({"undefined": "diverged.loss"}, math.nan, "undefined(diverged.loss)"),
])  # fmt: skip
def test_statistics(statistic: dict[str, Any], wanted: float, written: str) -> None:
    assert value(statistic, KNOWN.get) == pytest.approx(wanted, nan_ok=True)
    assert text(statistic) == written


def test_what_is_not_defined_makes_no_number() -> None:
    for statistic in (
        {"ratio": ["c.loss", "b.loss"]},
        {"max": ["b.loss", "c.loss"]},
        {"min": ["c.loss", "b.loss"]},
    ):
        assert math.isnan(value(statistic, KNOWN.get))


def test_interval_is_students() -> None:
    """1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.30265."""
    low, high = interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low, high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), abs=1e-4)
    assert interval([1.0]) is None and interval([1.0, math.nan, 2.0]) is None


@pytest.mark.parametrize(("bounds", "low", "high", "verdict"), [
    ({"below": 1.0}, 0.8, 0.99, "reproduced"),
    ({"below": 1.0}, 0.8, 1.01, "inconclusive"),
    ({"below": 1.0}, 1.0, 1.2, "not reproduced"),
    ({"above": 0.0}, 0.01, 0.5, "reproduced"),
    ({"above": 0.0}, -0.1, 0.5, "inconclusive"),
    ({"above": 0.0}, -0.5, -0.1, "not reproduced"),
    ({"above": 0.97, "below": 1.03}, 0.98, 1.02, "reproduced"),
    ({"above": 0.97, "below": 1.03}, 1.04, 1.1, "not reproduced"),
    ({"above": 0.97, "below": 1.03}, 0.9, 0.96, "not reproduced"),
    ({"above": 0.97, "below": 1.03}, 0.9, 1.1, "inconclusive"),
])  # fmt: skip
def test_the_whole_interval_decides(bounds: dict[str, float], low: float, high: float, verdict: str) -> None:
    assert decide(claim(**bounds), (low, high), 3) == verdict


def test_two_seeds_are_no_verdict() -> None:
    assert decide(claim(below=1.0), (0.1, 0.2), 2) == decide(claim(below=1.0), None, 3) == "not judged"


def test_thresholds_are_written_as_asked() -> None:
    assert threshold(claim(below=1.01)) == "< 1.01"
    assert threshold(claim(above=0.97, below=1.03)) == "> 0.97 and < 1.03"


def finding(**changes: Any) -> dict[str, Any]:
    runs = {"a": {"measures": [{"kind": "loss", "lengths": [1, 2]}]}, "b": {"start": "a", "tokens": 0.1}}
    claims = [{"id": "A", "sentence": "s", "source": "t", "why": "w", "below": 1.0,
               "statistic": {"ratio": ["a.ppl@2L", "a.ppl@1L"]}}]  # fmt: skip
    return {
        "name": "f",
        "title": "t",
        "paper": "p",
        "differs": "d",
        "longest": 2,
        "runs": runs,
        "claims": claims,
    } | changes


@pytest.mark.parametrize(("changes", "says"), [
    ({"runs": {"a": {"start": "x"}}, "claims": []}, "runs.a: there is no run x"),
    ({"runs": {"a": {"tokens": 0}}, "claims": []}, "runs.a: tokens: 0 needs start"),
    ({"claims": [finding()["claims"][0] | {"statistic": {"undefined": "c.ppl@2L"}}]}, "claim A: there is no run c"),
    ({"claims": [finding()["claims"][0] | {"statistic": {"undefined": "a.ppl@3L"}}]},
     "claim A: a gives no ppl@3L; did you mean"),
    ({"claims": finding()["claims"] * 2}, "claims: two have the same id"),
    ({"claims": [finding()["claims"][0] | {"statistic": {"quotient": [1, 2]}}]}, "quotient"),
    ({"claims": [finding()["claims"][0] | {"statistic": {"ratio": ["a.ppl@2L"]}}]}, "expected a list, of two"),
    ({"claims": [finding()["claims"][0] | {"statistic": {"undefined": ["a.ppl@2L"]}}]}, "expected the name of"),
    ({"claims": [finding()["claims"][0] | {"below": math.inf}]}, "claim A: neither below nor above"),
    ({"longest": 1}, "runs.a: 2 L is above longest, 1 L; raise that"),
    ({"runs": {"a": {"start": "b"}, "b": {"start": "a"}}, "claims": []}, "runs.a: starts from itself"),
    ({"claims": [finding()["claims"][0] | {"superseded_by": "B"}]}, "claim A: superseded_by: there is no claim B"),
    ({"figures": [{"title": "t", "x": "length", "runs": ["z"]}]}, "figures: there is no run z"),
])  # fmt: skip
def test_mistakes_in_a_finding_are_said_before_anything_runs(changes: dict[str, Any], says: str) -> None:
    validate(Finding, finding())
    with pytest.raises(UserError, match=says):
        validate(Finding, finding(**changes))


def test_superseded_runs_are_needed_by_nothing_else() -> None:
    new = {"id": "A", "sentence": "s", "source": "t", "why": "w", "below": 1.0, "statistic": "new.val_loss"}
    claims = [new, new | {"id": "B", "statistic": "old.val_loss", "superseded_by": "A"}]
    runs: dict[str, dict[str, Any]] = {"new": {}, "rates": {}, "old": {"tuned_as": "rates"}, "drawn": {}}
    made = [validate(Finding, finding(runs=runs, claims=claims))]
    for name in ("new", "drawn"):
        made.append(validate(Finding, finding(runs=runs | {name: {"tuned_as": "rates"}}, claims=claims)))
    assert [found.superseded_runs() for found in made] == [{"old", "rates"}, {"old"}, {"old"}]


@pytest.mark.parametrize("name", FINDINGS)
def test_every_claim_of_the_repository_has_a_threshold_and_a_reason(name: str) -> None:
    found = read_finding(name)
    for each in found.claims:
        assert threshold(each) and each.why.strip() and each.source.strip()
    assert len(found.claims) >= 8


def test_names_of_results() -> None:
    run = RunSpec(measures=[Measure(kind="loss", lengths=[1, 0.5, 2], protocol="last")])
    assert {"loss@0.5L/last", "ppl@1L/last", "beyond@2L/last", "val_loss"} <= run.names()
    assert "beyond@1L/last" not in run.names() and "loss@1L" not in run.names()
