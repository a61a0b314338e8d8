"""What is run, and that nothing is run twice."""

from __future__ import annotations

import json
import os
import shutil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import RunFailed, UserError, validate
from model.findings import code_version as versions
from model.findings.jobs import Job, Plan, Results
from model.findings.judge import lookup
from model.findings.measure import measure_id
from model.findings.page import publish
from model.findings.pool import Display, begin, gpus_for, required, run_all, weights_of
from model.findings.spec import Finding, Scale
from model.findings.texts import prepare_texts

LOSS = {"kind": "loss", "lengths": [1, 2]}
TINY: dict[str, Any] = {
    "title": "t",
    "length": 32,
    "tokens": 1024,
    "batch_tokens": 128,
    "val_tokens": 500,
    "probe_steps": 2,
    "probe_windows": 16,
    "seeds": [0, 1],
    "judged": False,
    "sizes": {},
    "overrides": ["tokenizer=bytes", "model.n_layer=1", "model.n_head=2", "model.n_embd=32",
                  "train.precision=fp32", "train.eval_tokens=500"],
}  # fmt: skip


def finding(name: str, **runs: dict[str, Any]) -> Finding:
    values = {
        "name": name,
        "title": name,
        "paper": "p",
        "differs": "d",
        "longest": 4,
        "runs": runs,
        "claims": [],
    }
    return validate(Finding, values)


def plan(tmp_path: Path, *findings: Finding, **changes: Any) -> Plan:
    scale = validate(Scale, TINY | changes)
    return Plan(findings, scale, Results(tmp_path / "runs", scale))


def test_findings_share_runs_and_a_run_gets_the_measures_of_all(tmp_path: Path) -> None:
    a = finding(
        "a", rope={"overrides": ["position=rope"], "measures": [LOSS]}, none={"overrides": ["position=none"]}
    )
    far = {"kind": "loss", "lengths": [4]}
    b = finding("b", other={"overrides": ["position=rope"], "measures": [far, LOSS]})
    made = plan(tmp_path, a, b)
    assert len(made.jobs) == 4  # rope and none, two seeds
    shared = made.place["a", "rope", 1]
    assert shared is made.place["b", "other", 1] and [m.lengths for m in shared.measures] == [[1, 2], [4]]
    assert shared.config.seed == 1 and shared.config.train.steps == 8 and shared.config.train.batch_size == 4


def key(tmp_path: Path, overrides: list[str], **changes: Any) -> str:
    return next(iter(plan(tmp_path, finding("a", x={"overrides": overrides}), seeds=[0], **changes).jobs))


def test_a_key_stands_for_all_that_decides_about_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = key(tmp_path, ["position=rope"])
    assert same == key(tmp_path, ["position=rope", "logger.project=other"])
    others = [key(tmp_path, ["position=rope", "position.base=500"]), key(tmp_path, ["position=none"]),
              key(tmp_path, ["position=rope"], tokens=2048)]  # fmt: skip
    assert len({same, *others}) == 4
    monkeypatch.setattr("model.findings.jobs.code_version", lambda *modules: "other")
    assert key(tmp_path, ["position=rope"]) != same


def test_code_version_is_about_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)

    def version(code: str) -> str:
        (tmp_path / "m.py").write_text(code)
        versions.code_version.cache_clear()
        return versions.code_version("m")

    first = version('"""Doc."""\ndef f(x):\n    """Doc."""\n    return x + 1\n')
    assert first == version('def f(x):  # why\n    """Other."""\n    return (x + 1)\n')
    assert first != version("def f(x):\n    return x + 2\n")
    versions.code_version.cache_clear()


def test_tuning_decides_about_all_seeds(tmp_path: Path) -> None:
    tuned = finding(
        "a",
        rope={
            "overrides": ["position=rope"],
            "tune": [f"optim.muon_lr={r} optim.lr={r / 10}" for r in (0.01, 0.02, 0.03)],
        },
        half={"overrides": ["position=rope"], "length": 0.5, "tuned_as": "rope"},
        child={"start": "rope", "tokens": 0.5},
    )
    before = plan(tmp_path, tuned)
    assert before.waiting == 6 and len(before.jobs) == 3
    for (options, job), loss in zip(before.tuning["a", "rope"], (2.0, 1.5, 1.9), strict=True):
        assert options == [f"optim.muon_lr={job.config.optim.muon_lr}", f"optim.lr={job.config.optim.lr}"]
        before.results.add(job, val_loss=loss)
    diverged = before.tuning["a", "rope"][0][1]
    before.results.file(diverged).unlink()
    before.results.add(diverged, trained=True, diverged="loss is nan")
    after = plan(tmp_path, tuned)
    assert after.waiting == 0
    assert {job.config.optim.muon_lr for job in after.place.values()} == {0.02}
    assert after.place["a", "rope", 0].key in before.jobs  # the one that won is not run again
    assert len(after.jobs) == 3 + 1 + 2 + 2
    assert after.place["a", "half", 1].config.model.context_length == 16


def test_readings_train_nothing_and_need_their_parents_weights(tmp_path: Path) -> None:
    scaled = ["position/scaling=linear", "position.scaling.factor=4"]
    made = plan(
        tmp_path,
        finding(
            "a",
            rope={"overrides": ["position=rope"]},
            read={"start": "rope", "tokens": 0, "overrides": scaled, "measures": [LOSS]},
            tuned={"start": "read", "tokens": 0.5, "length": 4},
        ),
        seeds=[0],
    )
    rope, read, tuned = (made.place["a", name, 0] for name in ("rope", "read", "tuned"))
    assert not read.trains and weights_of(read) is rope and read.config.model.context_length == 32
    assert tuned.config.model.context_length == 128 and tuned.config.model.original_length == 32
    assert tuned.config.position["scaling"]["factor"] == 4 and tuned.config.seed == 0
    made.results.add(rope, trained=True)
    # judged already, but the weights are on another machine
    assert rope.key in required(made, tmp_path / "work")
    for job in (read, tuned):
        made.results.add(job, trained=True, measures={measure_id(m, made.scale): {} for m in job.measures})
    assert required(made, tmp_path / "work") == {}


def run_tiny(tmp_path: Path, found: Finding, **changes: Any) -> Plan:
    return run_all(lambda: plan(tmp_path, found, **changes), tmp_path / "work", 2, 1, [])


def test_a_failed_run_is_told_with_its_reason_and_the_rest_is_finished(tmp_path: Path) -> None:
    bad = {"overrides": ["position=none", "data=text", "data.path=/nowhere"]}
    both = finding("a", bad=bad, good={"overrides": ["position=none"], "measures": [LOSS]})
    with pytest.raises(RunFailed, match="1 of 2 runs failed; the reasons are at the end of .*log.txt"):
        run_tiny(tmp_path, both, seeds=[0])
    made = plan(tmp_path, both, seeds=[0])
    good, failed = made.place["a", "good", 0], made.place["a", "bad", 0]
    assert made.results.is_done(good) and not made.results.is_done(failed)
    assert "/nowhere: no text file there" in (tmp_path / "work" / failed.key / "log.txt").read_text()
    result = made.results.read(good)
    (values,) = result["measures"].values()
    assert set(values) == {"loss@1L", "ppl@1L", "bits@1L", "loss@2L", "ppl@2L", "bits@2L", "beyond@2L"}
    assert values["loss@1L"] == pytest.approx(result["val_loss"], abs=0.3) and result["tokens"] == 1024


def test_a_result_does_not_depend_on_what_the_worker_did_before(tmp_path: Path) -> None:
    """One worker does dropout with another seed first; then a fresh one has only the second job."""
    found = finding("a", none={"overrides": ["position=none", "model.dropout=0.1"]})
    after = run_all(lambda: plan(tmp_path / "after", found), tmp_path / "work", 1, 1, [])
    alone = run_tiny(tmp_path / "alone", found, seeds=[1])
    job = after.place["a", "none", 1]
    assert alone.results.read(job)["curve"] == after.results.read(job)["curve"] != []


def names(jobs: dict[str, Job]) -> set[str]:
    return {job.name for job in jobs.values()}


def test_what_was_measured_by_other_code_or_on_other_tokens_is_measured_again(tmp_path: Path) -> None:
    found = finding("a", none={"overrides": ["position=none"], "measures": [LOSS]})
    run_tiny(tmp_path, found, seeds=[0])
    assert required(plan(tmp_path, found, seeds=[0]), tmp_path / "work") == {}
    again = plan(tmp_path, found, seeds=[0], val_tokens=400)
    assert names(required(again, tmp_path / "work")) == {"none, seed 0"}
    first = again.results.read(next(iter(again.jobs.values())))
    run_tiny(tmp_path, found, seeds=[0], val_tokens=400)
    second = again.results.read(next(iter(again.jobs.values())))
    (old, new), fresh = second["measures"].values(), tmp_path / "fresh"
    assert second["curve"] == first["curve"] and old != new
    (wanted,) = (
        run_tiny(fresh, found, seeds=[0], val_tokens=400)
        .results.read(next(iter(again.jobs.values())))["measures"]
        .values()
    )
    assert new == wanted


def test_lost_weights_are_trained_again_and_their_measures_taken_again(tmp_path: Path) -> None:
    found = finding("a", rope={"overrides": ["position=rope"], "measures": [LOSS]})
    child = {"start": "rope", "tokens": 0.5}
    made = run_tiny(tmp_path, found, seeds=[0])
    rope = next(iter(made.jobs.values()))
    first = made.results.read(rope)
    made.results.add(rope, measures={name: {"loss@1L": 99.0} for name in first["measures"]})
    shutil.rmtree(tmp_path / "work")
    found = finding(
        "a", rope=found.runs["rope"].model_dump(exclude={"measures"}) | {"measures": [LOSS]}, child=child
    )
    run_tiny(tmp_path, found, seeds=[0])
    assert made.results.read(rope)["measures"] == first["measures"]


def test_what_diverged_is_not_run_again_and_has_no_numbers(tmp_path: Path) -> None:
    found = finding(
        "a", none={"overrides": ["position=none"], "measures": [LOSS]}, child={"start": "none", "tokens": 0.5}
    )
    made = plan(tmp_path, found, seeds=[0])
    made.results.add(made.place["a", "none", 0], trained=True, diverged="loss is nan")
    assert required(made, tmp_path / "work") == {}
    assert lookup(found, made, 0)("none.loss@1L") is None
    claims = publish(asking(found), made, tmp_path, "command")
    assert [(claim["mean"], claim["verdict"]) for claim in claims] == [(None, "not judged")] * 2
    json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    text = (tmp_path / "a.md").read_text()
    assert (
        "no number, for a run diverged | **not judged**" in text and "| none | diverged | diverged |" in text
    )


def test_longer_runs_have_the_tokens_and_the_size_that_the_scale_says(tmp_path: Path) -> None:
    runs = {
        "usual": {"overrides": ["position=rope"]},
        "long": {"overrides": ["position=rope"], "longer": True},
        "small": {"overrides": ["position=rope"], "longer": True, "size": "ninth"},
        "child": {"start": "long", "tokens": 0.5, "longer": True},
    }
    sizes = {"third": ["model.n_embd=16"], "ninth": ["model.n_embd=8"]}
    longer = {"tokens": 4, "size": "third"}
    made = plan(tmp_path, finding("a", **runs), seeds=[0], sizes=sizes, longer=longer)
    configs = {name: made.place["a", name, 0].config for name in runs}
    assert {name: (c.train.steps, c.model.n_embd) for name, c in configs.items()} == {
        "usual": (8, 32),
        "long": (32, 16),
        "small": (32, 8),
        "child": (16, 16),
    }
    same = plan(tmp_path, finding("a", **runs), seeds=[0], sizes=sizes)
    assert same.place["a", "usual", 0] is same.place["a", "long", 0]


def test_what_only_superseded_claims_need_is_shown_when_on_record_and_run_when_asked(tmp_path: Path) -> None:
    losses = {"measures": [LOSS]}
    runs = {
        "new": {"overrides": ["position=none"], **losses},
        "old": {"overrides": ["position=rope"], "tuned_as": "rates", **losses},
        "rates": {"overrides": ["position=rope"], "tune": ["optim.lr=0.1", "optim.lr=0.2"]},
        "drawn": {"overrides": ["position=alibi"], **losses},
    }
    words = {"sentence": "s", "source": "t", "why": "w", "above": 0.5}
    claims = [
        {"id": "B", "statistic": "new.loss@1L", **words},
        {"id": "A", "statistic": {"ratio": ["old.loss@1L", "new.loss@1L"]}, "superseded_by": "B", **words},
    ]
    figures = [{"title": "Both", "x": "length", "runs": ["old", "new"]}]
    figures.append({"title": "Former", "x": "length", "runs": ["old"]})
    found = finding("a", **runs).model_dump() | {"claims": claims, "figures": figures}
    asked = validate(Finding, found)
    made = plan(tmp_path, asked, seeds=[0])
    assert {name for _, name, _ in made.place} == {"new", "drawn"} and len(made.jobs) == 2
    assert made.waiting == 0 and not made.tuning
    measured = {measure_id(m, made.scale): {"loss@1L": 3.0} for m in made.place["a", "new", 0].measures}
    for job in made.jobs.values():
        made.results.add(job, trained=True, measures=measured)
    assert [claim["id"] for claim in publish(asked, made, tmp_path, "command")] == ["B"]
    text = (tmp_path / "a.md").read_text()
    assert "Superseded, and not run here: A." in text and text.count("](figures/") == 1
    every = Plan([asked], made.scale, made.results, superseded=True)
    assert len(every.jobs) == 4 and every.waiting == 2
    for _, tried in every.tuning["a", "rates"]:
        every.results.add(tried, val_loss=2.0, trained=True, measures=measured)
    known = plan(tmp_path, asked, seeds=[0])
    assert {name for _, name, _ in known.place} == set(runs) and len(known.jobs) == 4
    assert [claim["id"] for claim in publish(asked, known, tmp_path, "command")] == ["B", "A"]
    assert "Superseded, and not run here" not in (tmp_path / "a.md").read_text()


def asking(found: Finding) -> Finding:
    """With a claim about a number and one about its absence."""
    words = {"sentence": "s", "source": "t", "why": "w", "above": 0.5}
    statistics = {"A": {"ratio": ["none.loss@2L", "none.loss@1L"]}, "B": {"undefined": "none.loss@2L"}}
    claims = [{"id": name, "statistic": statistic, **words} for name, statistic in statistics.items()]
    figures = [{"title": "Loss", "x": "length", "runs": ["none"]}]
    return validate(Finding, found.model_dump() | {"claims": claims, "figures": figures})


def test_code_that_changes_under_a_run_does_not_run_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process read the code before the change, its workers after it: they name their measures otherwise."""
    monkeypatch.setattr("model.findings.jobs.measure_id", lambda what, scale: "of other code")
    found = finding("a", none={"overrides": ["position=none"], "measures": [LOSS]})
    with pytest.raises(RunFailed, match="1 of 1 runs failed"):
        run_tiny(tmp_path, found, seeds=[0])
    (log,) = (tmp_path / "work").glob("*/log.txt")
    assert "was code changed while it ran?" in log.read_text()


def test_each_worker_has_a_gpu_of_those_that_the_command_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(tmp_path, finding("a", none={"overrides": ["position=none"]}))
    monkeypatch.setattr("model.findings.pool.end_with_parent", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_for(made) == []
    monkeypatch.setattr("model.findings.pool.pick_device", lambda *asked: torch.device("cuda"))
    assert gpus_for(made) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    gpus, turn, given = gpus_for(made), get_context("spawn").Value("i", 0), []
    for _ in range(3):
        begin(gpus, turn)
        given.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert given == ["3", "GPU-5", "3"]
    begin([], turn)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_text_without_a_document_as_long_as_asked_is_refused_before_any_training(tmp_path: Path) -> None:
    found = finding("a", none={"overrides": ["position=none"], "measures": [LOSS]})
    made = plan(tmp_path, found, seeds=[0], length=2**20, batch_tokens=2**20)
    with pytest.raises(
        UserError, match="finding=a: scores windows of 4,194,304 tokens, and no held-out document"
    ):
        prepare_texts([found], made)
    prepare_texts([found], plan(tmp_path, found, seeds=[0]))


def test_the_time_left_counts_jobs_that_tuning_has_decided_about_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("model.findings.pool.time.monotonic", lambda: clock[0])
    found = finding("a", none={"overrides": ["position=none"]})
    few, all_of_them = plan(tmp_path, found, seeds=[0, 1]), plan(tmp_path, found, seeds=[0, 1, 2, 3])
    display, jobs = Display(), list(all_of_them.jobs.values())
    said = []
    for clock[0], known, todo in (
        (0.0, few, jobs[:2]),
        (120.0, few, jobs[1:2]),
        (240.0, all_of_them, jobs[2:]),
    ):
        display.show(known, [], todo, tmp_path)
        said.append(display._bar.tasks[0].fields["text"].partition(";")[0])
    assert said == ["estimating", "2 min left", "4 min left"]
