"""The commands as a person types them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.training import checkpoint
from tests.conftest import ROOT, TINY, assert_same, final, metrics

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "NETRC": os.devnull,
}


def run(
    script: str, *arguments: str, cwd: Path, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr + result.stdout
    return result


def processor_seconds() -> float:
    """Of all commands so far: what a command costs, whatever runs beside it."""
    spent = os.times()
    return spent.children_user + spent.children_system


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small text and, in runs/first, a finished tiny run on it."""
    folder = tmp_path_factory.mktemp("place")
    text = "In the beginning God created the heaven and the earth. And it was so, é🙂.\n" * 300
    (folder / "a,b=c.txt").write_text(text)
    run("train.py", *ON_TEXT, "run_dir=runs/first", "train.steps=30", "logger.mode=offline", cwd=folder)
    return folder


ON_TEXT = [*[o for o in TINY if o != "data=bin"], "data=text", "data.path=a,b=c.txt"]
SCRIPTS = [
    "train.py",
    *(f"scripts/{name}.py" for name in ("prepare", "sample", "evaluate", "reproduce", "plot", "benchmark")),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_a_page_for_people_and_quick(script: str, tmp_path: Path) -> None:
    began = processor_seconds()
    text = run(script, "--help", cwd=tmp_path).stdout
    assert processor_seconds() - began < 3
    assert "python " + script in text and "key=value" in text and len(text.splitlines()) < 60
    assert list(tmp_path.iterdir()) == []


def test_run_directory_holds_what_is_promised(place: Path) -> None:
    path = place / "runs/first"
    assert {"config.yaml", "run.json", "metrics.jsonl", "checkpoints", "evaluation"} <= {
        p.name for p in path.iterdir()
    }
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 10, 20, 30]
    assert all(line["tokens"] == line["step"] * 4 * 32 for line in lines)
    assert {
        "train/loss",
        "optim/lr",
        "optim/grad_norm",
        "perf/tokens_per_s",
        "val/loss",
        "val/perplexity",
    } <= lines[-1].keys()
    assert json.loads((path / "evaluation/val.json").read_text())["tokens"] > 0
    assert yaml.safe_load((path / "config.yaml").read_text())["position"]["layout"] == "half"


def test_offline_wandb_run_lies_beside_and_holds_the_same_numbers(place: Path) -> None:
    shown = wandb_shows(place)[0]
    last = metrics(place / "runs/first")[-1]
    assert str(last["val/loss"])[:10] in shown and "sample" in shown


def wandb_shows(place: Path) -> list[str]:
    """What `wandb leet` says of each offline folder of runs/first, in the order of time."""
    identifier = json.loads((place / "runs/first/run.json").read_text())["id"]
    wandb, shown = Path(sys.executable).parent / "wandb", []
    for folder in sorted((place / "runs/wandb").glob(f"offline-run-*-{identifier}")):
        command = [wandb, "leet", "inspect", "--json", folder]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        shown.append(result.stdout)
    return shown


def test_evaluation_and_retrieval_go_to_wandb_once(place: Path) -> None:
    command = ["run=runs/first", "lengths=[32,128]", "retrieval=true", "name=again"]
    said = run("scripts/evaluate.py", *command, cwd=place).stdout
    scores = json.loads((place / "runs/first/evaluation/again.json").read_text())["scores"]
    found = json.loads((place / "runs/first/evaluation/again-retrieval.json").read_text())["scores"]
    assert [row["length"] for row in found] == list(range(20, 129, 4)) and "retrieves to" in said
    assert all(row["taught"] == 0 and row["chance"] == 1 / 16 for row in found)
    shown = wandb_shows(place)[-1]
    assert "val/loss_at/128" in shown and str(scores[1]["loss"])[:10] in shown and "val/retrieves_to" in shown
    count = len(wandb_shows(place))
    assert run("scripts/evaluate.py", *command, cwd=place).stdout == said
    assert len(wandb_shows(place)) == count


def test_final_screen_has_table_sample_and_next_commands(place: Path) -> None:
    text = run("train.py", *ON_TEXT, "run_dir=runs/second", "train.steps=2", cwd=place).stdout
    for part in (
        "perplexity",
        "bits/byte",
        "tokens/s",
        "parameters",
        "Sample",
        "scripts/sample.py run=runs/second",
        "resume=runs/second",
    ):
        assert part in text


@pytest.mark.parametrize(("override", "says"), [
    ("train.step=3", "train.step: unknown key; did you mean train.steps?"),
    ("+lrr=1", "lrr: unknown key; did you mean optim.lr?"),
    ("+optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
    ("optim.lr=abc", "optim.lr=abc: expected a valid number"),
    ("optim.lr=-1", "optim.lr=-1: expected greater than 0"),
    ("optim.lr=nan", "optim.lr=nan: expected a finite number"),
    ("model.dropout=1.5", "model.dropout=1.5: expected less than 1"),
    ("train.steps=true", "train.steps=True: expected something other than true or false"),
    ("optim.betas=[0.9,1]", "expected less than 1"),
    ("position=null", "position"),
    ("seed=18446744073709551616", "seed=18446744073709551616: expected less than"),
    ("name=a/b", "name=a/b: "),
    ("+model.causal=false", "model.causal=false would see the tokens"),
    ("objective=mml", "objective=mml: expected 'causal' or 'mlm'"),
    ("resume=", "resume=<run_dir> takes a run directory"),
    ("nmae=x", "nmae: unknown key; did you mean name?"),
    ("model.n_head=3", "model.n_head=3 does not divide model.n_embd=32"),
    ("train.batch_size=0", "train.batch_size=0: expected greater than 0"),
    ("train.eval_interval=0", "train.eval_interval=0: expected greater than 0"),
    ("train.steps=1.5", "train.steps=1.5: expected a valid integer"),
    ("train.precision=fp16", "train.precision=fp16: expected 'auto', 'fp32' or 'bf16'"),
    ("position=ropee", "position=ropee: no such option; did you mean rope?"),
    ("position.base=abc", "position.base=abc: expected a valid number"),
    ("position.base=-3", "position.base=-3.0: expected a number above 1"),
    ("position.layout=mixed", "position.layout=mixed: expected 'interleaved' or 'half'"),
    ("+position.factor=4", "position.factor: unknown key; valid: position.base, position.layout"),
    ("train.micro_batch_size=3", "train.micro_batch_size=3 does not divide train.batch_size=4; give one of 1, 2, 4"),
    ("tokenizer.name=gpt5", "tokenizer.name=gpt5: expected gpt2, bytes, or gpt2_Nk"),
    ("train.device=tpu", "train.device=tpu: not available"),
    ("data.path=missing.txt", "data.path=missing.txt: no text file there"),
    ("data.path=null", "data.path: data=text needs a text file"),
    ("model.context_length=100000", "tokens, fewer than the 100001 that model.context_length=100000 needs"),
    ("resume=nowhere", "nowhere: not a run directory"),
    ("run_dir=runs/first", "run_dir=runs/first: already holds a run; continue it with resume=runs/first"),
    ("seed", "seed: cannot be parsed as key=value"),
    ("logger.mode=loud", "logger.mode=loud: expected 'auto', 'online', 'offline' or 'disabled'"),
])  # fmt: skip
def test_mistakes_get_one_sentence_and_exit_code_2(place: Path, override: str, says: str) -> None:
    before = {p: p.stat().st_mtime_ns for p in (place / "runs").rglob("*") if p.is_file()}
    began = processor_seconds()
    result = run("train.py", *ON_TEXT, override, cwd=place, code=2)
    assert processor_seconds() - began < 5
    assert says in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert {p: p.stat().st_mtime_ns for p in (place / "runs").rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in (place / "runs").iterdir()) == sorted(
        {p.parts[len(place.parts) + 1] for p in before}
    )


def test_numbers_in_scientific_notation_are_taken_as_integers(place: Path) -> None:
    run("train.py", *ON_TEXT, "train.steps=2e0", "run_dir=runs/scientific", cwd=place)
    assert yaml.safe_load((place / "runs/scientific/config.yaml").read_text())["train"]["steps"] == 2


def test_multirun_trains_every_combination_and_prints_one_table(place: Path) -> None:
    result = run(
        "train.py", "-m", *ON_TEXT, "train.steps=1", "position=none,alibi,learned", "seed=0,1", cwd=place
    )
    runs = [p for p in (place / "runs").iterdir() if "seed" in p.name]
    assert len(runs) == 6
    table = result.stdout.split("[job 5]")[1]
    assert all(f"position={name}" in table for name in ("none", "alibi", "learned"))
    configs = [yaml.safe_load((p / "config.yaml").read_text()) for p in runs]
    assert len({c["logger"]["group"] for c in configs}) == 1 and configs[0]["logger"]["group"].startswith(
        "sweep_"
    )
    assert all(f"seed={c['seed']}" in c["logger"]["tags"] for c in configs)


def test_failed_job_of_a_multirun_does_not_stop_the_others(place: Path) -> None:
    result = run(
        "train.py",
        "-m",
        *ON_TEXT,
        "train.steps=1",
        "model.n_head=3,4",
        "run_dir=runs/m_${hydra:job.num}",
        cwd=place,
        code=2,
    )
    assert "does not divide" in result.stderr and "1 of 2 jobs failed or were stopped" in result.stderr
    assert (place / "runs/m_1/metrics.jsonl").exists()


def test_three_runs_started_together_get_directories_of_their_own(place: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *ON_TEXT, "train.steps=1", "name=together"]
    started = [
        subprocess.Popen([*command, f"seed={i}"], cwd=place, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        for i in range(3)
    ]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert len([p for p in (place / "runs").iterdir() if "together" in p.name]) == 3


def test_two_runs_started_together_in_one_directory_do_not_mix(place: Path) -> None:
    arguments = ["train.steps=200", "train.log_interval=1", "run_dir=runs/shared"]
    started = [start(place, *arguments, f"seed={i}") for i in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2]
    assert any("in use by another training" in e or "already holds a run" in e for e in errors)
    assert [line["step"] for line in metrics(place / "runs/shared")] == list(range(1, 201))


def test_run_keeps_to_the_shards_it_was_trained_on(place: Path) -> None:
    (place / "changing.txt").write_text("In the beginning\n" * 300)
    options = [*ON_TEXT, "data.path=changing.txt", "train.steps=1", "run_dir=runs/changing"]
    run("train.py", *options, cwd=place)
    (place / "changing.txt").unlink()
    (place / "elsewhere").mkdir()
    run("scripts/evaluate.py", "run=../runs/changing", cwd=place / "elsewhere")
    run("train.py", "resume=../runs/changing", "train.steps=2", cwd=place / "elsewhere")

    shards = Path(json.loads((place / "runs/changing/run.json").read_text())["shards"])
    moved = shards.rename(place / "moved")
    result = run("scripts/evaluate.py", "run=runs/changing", cwd=place, code=2)
    assert "changing.txt: no text file there" in result.stderr
    run("train.py", "resume=runs/changing", "data=bin", f"data.path={moved}", "train.steps=3", cwd=place)

    (place / "changing.txt").write_text("In the end\n" * 500)
    changed = ["resume=runs/changing", "data=text", "data.path=changing.txt", "train.steps=4"]
    assert "trained with other data (train" in run("train.py", *changed, cwd=place, code=2).stderr


def test_screen_without_unicode_does_not_stop_a_training(place: Path) -> None:
    options = [*ON_TEXT, "train.steps=2", "run_dir=runs/ascii"]
    run("train.py", *options, cwd=place, LC_ALL="C", PYTHONIOENCODING="ascii")


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), *ON_TEXT, *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise TimeoutError(path)


LONG = ["train.steps=400", "train.save_interval=100", "train.eval_interval=150", "model.dropout=0.1"]


def test_kill_9_and_resume_equal_one_straight_run(place: Path) -> None:
    run("train.py", *ON_TEXT, *LONG, "run_dir=runs/straight", cwd=place)
    process = start(place, *LONG, "run_dir=runs/killed")
    wait_for(checkpoint.path_of(place / "runs/killed", 100), process)
    process.kill()
    process.wait()
    result = run("train.py", "resume=runs/killed", cwd=place)
    assert "Resuming runs/killed" in result.stdout
    assert_same(final(place / "runs/straight"), final(place / "runs/killed"))
    assert metrics(place / "runs/straight") == metrics(place / "runs/killed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_says_how_to_resume_and_exits_with_its_code(place: Path, number: signal.Signals) -> None:
    name = f"runs/{number.name}"
    process = start(place, *LONG, "train.steps=100000", f"run_dir={name}")
    wait_for(checkpoint.path_of(place / name, 100), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"python train.py resume={name}" in out and "Traceback" not in err
    assert final(place / name)["step"] > 100


def test_resume_says_what_changes_and_refuses_another_model(place: Path) -> None:
    run("train.py", *ON_TEXT, "train.steps=3", "run_dir=runs/longer", cwd=place)
    result = run("train.py", "resume=runs/longer", "train.steps=5", cwd=place)
    assert "changed on request: train.steps: 3 -> 5" in result.stdout
    assert final(place / "runs/longer")["step"] == 5
    result = run(
        "train.py",
        "resume=runs/longer",
        "position=alibi",
        "model.n_layer=3",
        "train.steps=9",
        cwd=place,
        code=2,
    )
    assert "model.n_layer (2 -> 3)" in result.stderr and "position._target_" in result.stderr


# --- sampling and evaluation -------------------------------------------------------------------------------


def sample(place: Path, *arguments: str) -> dict[str, Any]:
    out = place / f"sample{len(list(place.glob('sample*.json')))}.json"
    result = run("scripts/sample.py", "run=runs/first", *arguments, f"out={out}", cwd=place)
    content: dict[str, Any] = json.loads(out.read_text())
    for each in content["samples"]:
        assert each["prompt"] + each["text"] in result.stdout
    assert "tokens/s" in result.stderr
    return content


def test_sample_takes_any_text_and_the_cache_changes_nothing(place: Path) -> None:
    options = [
        'prompt=And God said, Let\'s see: a=b "c" é🙂\\',
        "max_new_tokens=40",
        "top_k=50",
        "top_p=0.95",
        "num_samples=3",
    ]
    cached, plain = sample(place, *options), sample(place, *options, "cache=false")
    assert cached["samples"] == plain["samples"] and len(cached["samples"]) == 3
    assert cached["samples"][0]["prompt"] == options[0].removeprefix("prompt=")
    assert len({tuple(s["tokens"]) for s in cached["samples"]}) == 3


def test_several_prompts_and_token_ids(place: Path) -> None:
    both = sample(place, 'prompt=["In the","And"]', "max_new_tokens=10")["samples"]
    alone = [sample(place, f"prompt={text}", "max_new_tokens=10")["samples"][0] for text in ("In the", "And")]
    assert both == alone
    ids = sample(place, f"prompt_ids={list(b'And')}", "max_new_tokens=10")["samples"][0]
    assert ids["tokens"] == alone[1]["tokens"]


def test_literal_special_token_in_a_prompt_is_text(place: Path) -> None:
    content = sample(place, "prompt=x<|endoftext|>y", "max_new_tokens=1")
    assert content["samples"][0]["prompt"] == "x<|endoftext|>y"


def test_sampling_survives_a_terminal_without_unicode(place: Path) -> None:
    run(
        "scripts/sample.py",
        "run=runs/first",
        "prompt=é🙂",
        "max_new_tokens=5",
        cwd=place,
        LC_ALL="C",
        PYTHONIOENCODING="ascii",
    )


@pytest.mark.parametrize(("arguments", "says"), [
    (["run=nowhere"], "nowhere: not a run directory"),
    ([], "run: missing; give run=<value>"),
    (["run=runs/first", "temperature=-1"], "temperature=-1: expected greater than or equal to 0"),
    (["run=runs/first", "top_k=-1"], "top_k=-1: expected"),
    (["run=runs/first", "prompt_ids=[999]"], "token id 999 is not in the vocabulary"),
    (["run=runs/first", "temprature=1"], "temprature: unknown key; did you mean temperature?"),
    (["run=runs/first", "max_new_tokens=0"], "max_new_tokens=0: expected greater than 0"),
])  # fmt: skip
def test_sample_mistakes(place: Path, arguments: list[str], says: str) -> None:
    assert says in run("scripts/sample.py", *arguments, cwd=place, code=2).stderr


def test_learned_positions_end_and_slide(place: Path) -> None:
    run("train.py", *ON_TEXT, "position=learned", "train.steps=1", "run_dir=runs/learned", cwd=place)
    arguments = ["run=runs/learned", "prompt=In", "max_new_tokens=50"]
    assert "give overflow=slide" in run("scripts/sample.py", *arguments, cwd=place, code=2).stderr
    run("scripts/sample.py", *arguments, "overflow=slide", cwd=place)
    result = run("scripts/evaluate.py", "run=[runs/learned,runs/first]", "lengths=[32,64]", cwd=place)
    assert "not defined beyond 32" in result.stdout
    scores = json.loads((place / "runs/first/evaluation/lengths.json").read_text())["scores"]
    assert [score["length"] for score in scores] == [32, 64] and scores[0]["tokens"] == scores[1]["tokens"]


def test_prepare_and_plot(place: Path) -> None:
    result = run(
        "scripts/prepare.py", "data=text", "data.path=a,b=c.txt", "tokenizer=bytes", "verify=true", cwd=place
    )
    assert "every byte as recorded" in result.stdout and "train-00000" in result.stdout
    run("scripts/plot.py", "run=runs/first", "metric=train/loss", "out=curve.png", cwd=place)
    assert (place / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "it has" in run("scripts/plot.py", "run=runs/first", "metric=los", cwd=place, code=2).stderr


@pytest.mark.parametrize("what", ["train", "position", "decode", "tokenize", "loader", "evaluate"])
def test_benchmarks_run(place: Path, what: str) -> None:
    small = [
        "n_layer=1",
        "n_head=2",
        "n_embd=32",
        "context_length=16",
        "vocab_size=64",
        "batch_size=2",
        "repeats=1",
        "megabytes=1",
    ]
    run("scripts/benchmark.py", f"what={what}", *small, cwd=place)
    rows = json.loads((place / f"benchmarks/{what}.json").read_text())["rows"]
    assert len(rows) >= 2 and rows[0]["time / first"] == 1


# --- W&B can never stop a training -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", ["absent", "nonsense mode", "log raises", "log exits", "folder not writable"]
)
def test_broken_wandb_is_said_once_and_training_is_the_same(place: Path, trouble: str) -> None:
    name = "runs/" + trouble.replace(" ", "_")
    broken = place / "broken" / trouble.replace(" ", "_")
    broken.mkdir(parents=True)
    environment, wanted = {"PYTHONPATH": str(broken)}, "warning: W&B is off for this run"
    if trouble == "absent":
        (broken / "wandb.py").write_text("raise ImportError('no wandb here')")
        (broken / "sitecustomize.py").write_text(
            "import importlib.metadata as m\nright = m.version\n"
            "def version(name):\n"
            "    if name == 'wandb': raise m.PackageNotFoundError(name)\n"
            "    return right(name)\n"
            "m.version = version\n"
        )
    elif trouble == "nonsense mode":
        environment["WANDB_MODE"] = "nonsense"
    elif trouble.startswith("log"):
        error = "RuntimeError('log is broken')" if trouble == "log raises" else "SystemExit(1)"
        (broken / "sitecustomize.py").write_text(
            f"import wandb\ndef log(self, *a, **k): raise {error}\nwandb.sdk.wandb_run.Run.log = log\n"
        )
    else:
        (place / "runs2").mkdir()
        (place / "runs2/wandb").write_text("a file where the folder should be")
        name = "runs2/blocked"
    options = [*ON_TEXT, "logger.mode=auto", "train.steps=30", f"run_dir={name}"]
    result = run("train.py", *options, cwd=place, **environment)
    assert result.stderr.count(wanted) == 1
    assert_same(final(place / name)["model"], final(place / "runs/first")["model"])
    assert metrics(place / name) == metrics(place / "runs/first")


@pytest.mark.parametrize("trouble", ["log never returns", "service stops answering"])
def test_wandb_that_hangs_keeps_no_training_from_its_end(place: Path, trouble: str) -> None:
    hangs = {
        "log never returns": "wandb.sdk.wandb_run.Run.log = lambda *a, **k: time.sleep(10**6)\n",
        "service stops answering": (
            "init = wandb.init\n"
            "def stopping(**options):\n"
            "    run = init(**options)\n"
            "    os.kill(wandb.setup()._connection._proc._process.pid, signal.SIGSTOP)\n"
            "    return run\n"
            "wandb.init = stopping\n"
        ),
    }
    program = place / "hangs" / trouble.replace(" ", "_") / "main.py"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport wandb\n{hangs[trouble]}"
        "import train\nfrom model import launch\nfrom model.training import metrics\n"
        "metrics.PATIENCE = 2\nlaunch.main('config', train.main)\n"
    )
    name = f"runs/{program.parent.name}"
    result = run(
        str(program), *ON_TEXT, "logger.mode=offline", "train.steps=30", f"run_dir={name}", cwd=place
    )
    assert result.stderr.count("warning: W&B has not taken all of this run in time; make a whole one") == 1
    assert metrics(place / name) == metrics(place / "runs/first")


def test_wandb_gets_each_step_once_in_order_with_all_its_metrics(place: Path) -> None:
    recorder = place / "recorder"
    recorder.mkdir()
    (recorder / "sitecustomize.py").write_text(
        "import json, wandb\n"
        "def log(self, values, step=None):\n"
        "    if step is not None: open('calls.jsonl', 'a').write(json.dumps([step, values]) + '\\n')\n"
        "wandb.sdk.wandb_run.Run.log = log\n"
    )
    options = [
        "logger.mode=offline",
        "train.steps=12",
        "train.log_interval=2",
        "train.eval_interval=3",
        "run_dir=runs/recorded",
    ]
    run("train.py", *ON_TEXT, *options, cwd=place, PYTHONPATH=str(recorder))
    calls = [json.loads(line) for line in (place / "calls.jsonl").read_text().splitlines()]
    assert [step for step, _ in calls] == [1, 2, 3, 4, 6, 8, 9, 10, 12]
    written = [json.loads(line) for line in (place / "runs/recorded/metrics.jsonl").read_text().splitlines()]
    assert [values for _, values in calls] == written


def test_rebuilt_wandb_run_has_every_point_once(place: Path) -> None:
    said = run("scripts/wandb_rebuild.py", "run=runs/first", cwd=place).stdout
    folder = place / said.split("wandb sync ")[1].strip()
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    last = metrics(place / "runs/first")[-1]
    assert str(last["val/loss"])[:10] in shown and "4 points" in said
    error = run("scripts/wandb_rebuild.py", "run=nothing", cwd=place, code=2).stderr
    assert "not a run directory" in error


# --- fine-tuning at a longer window ------------------------------------------------------------------------


def test_run_is_extended_and_goes_on_by_itself(place: Path) -> None:
    """The command of the README at a tiny size; the new run records its parent and needs it no longer."""
    extended = ["init_from=runs/first", "position/scaling=yarn", "position.scaling.factor=4"]
    more = ["model.context_length=128", "train.steps=3", "run_dir=runs/extended", "logger.mode=disabled"]
    said = run("train.py", *extended, *more, cwd=place).stdout
    assert "Starting from runs/first at step 30" in said
    record = json.loads((place / "runs/extended/run.json").read_text())["parent"]
    assert record == {"run": str(place / "runs/first"), "step": 30, "original_length": 32}
    stored = yaml.safe_load((place / "runs/extended/config.yaml").read_text())
    assert stored["model"]["original_length"] == 32 and stored["model"]["context_length"] == 128
    (place / "runs/first").rename(place / "runs/away")
    run("train.py", "resume=runs/extended", "train.steps=5", cwd=place)
    (place / "runs/away").rename(place / "runs/first")
    assert [line["step"] for line in metrics(place / "runs/extended")] == [1, 3, 5]
    twice = run("train.py", "init_from=runs/extended", "model.context_length=256", "train.steps=1", cwd=place)
    assert "Starting from runs/extended at step 5" in twice.stdout
    assert (
        "runs/none: not a run directory" in run("train.py", "init_from=runs/none", cwd=place, code=2).stderr
    )


def test_scalings_are_swept_with_the_keys_of_their_group(place: Path) -> None:
    said = run(
        "train.py",
        "-m",
        *ON_TEXT,
        "position/scaling=linear,ntk",
        "position.scaling.factor=4",
        "train.steps=1",
        cwd=place,
    ).stdout
    assert (
        said.count("position.scaling.factor=4") == 2 and "position/scaling=ntk" in said
    )  # each job, and the table


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("position.scaling=yarn", "a group is named with a slash; give position/scaling=yarn"),
        ("position/scaling=yarn", "position.scaling.factor: missing; give position.scaling.factor=<value>"),
        (
            "position/scaling=linear position=none",
            "position=alibi, learned, rope, rope_nope, sinusoidal can be scaled",
        ),
        (
            "position.scaling.factor=4",
            "position.scaling.factor: not a key here; position=alibi, learned, rope",
        ),
        ("position/scaling=jarn", "position/scaling=jarn: no such option; did you mean yarn?"),
    ],
)
def test_mistaken_scaling_is_one_sentence(place: Path, argument: str, message: str) -> None:
    assert message in run("train.py", *argument.split(), cwd=place, code=2).stderr
