"""Several processes, started by torchrun as users start them: one training, whatever their number."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.errors import UserError
from model.training import checkpoint
from model.training.loop import accumulate
from model.training.ranks import FRESH_STORE, Ranks
from tests.conftest import POSITIONS, ROOT, TINY, tiny_gpt

OPTIONS = [
    *(option for option in TINY if not option.startswith("logger")),
    "optim=adamw",  # Muon orthogonalises in bf16, which makes much of a last bit
    "train.steps=12",
    "train.eval_interval=4",
    "train.log_interval=1",
    "train.micro_batch_size=1",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def command(tmp_path: Path, shards: Path) -> list[str]:
    return [str(ROOT / "train.py"), *OPTIONS, f"data.path={shards}", "logger.mode=disabled"]


@contextmanager
def started(tmp_path: Path, *arguments: str, log: str = "log") -> Iterator[subprocess.Popen[bytes]]:
    """A command whose output goes to `log`; it and all that it started end with the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", FRESH_STORE: "1"}
    with open(tmp_path / log, "ab") as output:
        process = subprocess.Popen(
            arguments,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    (tmp_path / "log").unlink(missing_ok=True)
    with started(tmp_path, *arguments) as process:
        code = process.wait(120)
    return code, (tmp_path / "log").read_text()


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def steps_of(path: Path) -> int:
    try:
        return int(lines(path)[-1]["step"])
    except (OSError, IndexError, ValueError):
        return 0


def assert_same_curve(path: Path, other: Path, rel: float) -> None:
    rows, others = lines(path), lines(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for a, b in zip(rows, others, strict=True):
        for key in ("train/loss", "val/loss", "optim/grad_norm"):
            assert (key in a) == (key in b)
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=rel)


def test_two_processes_have_the_losses_of_one_and_one_run(tmp_path: Path, command: list[str]) -> None:
    code, said = run(
        tmp_path, *TORCHRUN, "--nproc_per_node=2", *command, "run_dir=runs/two", "logger.mode=offline"
    )
    assert code == 0, said
    assert said.count("Training ") == 1 and "on 2 processes, cpu," in said and said.count("step 12/12") == 1
    assert len(list(tmp_path.glob("runs/wandb/offline-run-*"))) == 1
    assert run(tmp_path, sys.executable, *command, "run_dir=runs/one")[0] == 0
    assert_same_curve(tmp_path / "runs/two", tmp_path / "runs/one", rel=1e-5)
    two, one = (
        json.loads((tmp_path / f"runs/{name}/evaluation/val.json").read_text()) for name in ("two", "one")
    )
    assert (two["tokens"], two["clusters"]) == (one["tokens"], one["clusters"])
    assert two["by_position"] == [pytest.approx(bucket, rel=1e-5) for bucket in one["by_position"]]
    own = checkpoint.read(checkpoint.newest_first(tmp_path / "runs/two")[0])["rng"]
    assert len(own) == 2 and not torch.equal(own[0]["cpu"], own[1]["cpu"])  # dropout masks of their own


@pytest.mark.slow  # what it is about has tests of one process each in test_faults.py
def test_signal_saves_once_and_another_number_of_processes_goes_on(
    tmp_path: Path, command: list[str]
) -> None:
    straight, pieces = tmp_path / "runs/straight", tmp_path / "runs/pieces"
    command = [*command, "train.steps=200", "train.eval_interval=100", "train.save_interval=200"]
    with started(tmp_path, *TORCHRUN, "--nproc_per_node=2", *command, f"run_dir={pieces}") as agent:
        wait_for(lambda: steps_of(pieces) >= 3)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) != 0
    said = (tmp_path / "log").read_text()
    stopped = checkpoint.newest_first(pieces)
    assert said.count("SIGTERM: saving") == 1 and said.count("saved. Continue with") == 1, said
    assert 3 <= checkpoint.read(stopped[0])["step"] < 200
    code, said = run(tmp_path, sys.executable, *command, f"run_dir={pieces}", "resume=auto")
    assert code == 0, said
    assert run(tmp_path, sys.executable, *command, f"run_dir={straight}", "resume=auto")[0] == 0
    # rounding grows over hundreds of steps; other data would be seen in the first digit
    assert_same_curve(pieces, straight, rel=2e-3)
    # a job that is queued once more does no harm
    code, said = run(tmp_path, *TORCHRUN, "--nproc_per_node=2", *command, f"run_dir={pieces}", "resume=auto")
    assert code == 0 and "finished at step 200" in said


def test_dying_process_ends_the_job_with_its_reason(tmp_path: Path, command: list[str]) -> None:
    # rank 1 alone has no memory left, as it were: its step fails
    (tmp_path / "main.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\nfrom model import launch\nfrom model.errors import RunFailed\nfrom model.training import loop\n"
        "advance = loop.Training._advance\n"
        "def fails(self):\n"
        "    if self.step == 3 and self.ranks.rank == 1:\n"
        "        raise RunFailed('no memory left')\n"
        "    return advance(self)\n"
        "loop.Training._advance = fails\n"
        "launch.main('config', train.main)\n"
    )
    command = ["main.py", *command[1:], "train.steps=100000", "run_dir=run"]
    with started(tmp_path, *TORCHRUN, "--nproc_per_node=2", *command) as agent:
        wait_for(lambda: "no memory left" in (tmp_path / "log").read_text())
        began = time.monotonic()
        assert agent.wait(40) != 0
    assert time.monotonic() - began < 30
    assert "[rank 1] error: no memory left" in (tmp_path / "log").read_text()


def test_mistakes_are_said_once(tmp_path: Path, command: list[str]) -> None:
    for mistake, wanted in {
        "train.batch_size=7": "cannot be shared by 2 processes in micro-batches of 1; give train.batch_size=6 or 8",
        "trian.steps=3": "did you mean train.steps",
        "run_dir=/dev/null": "run_dir=/dev/null: is a file",
    }.items():
        code, said = run(tmp_path, *TORCHRUN, "--nproc_per_node=2", *command, mistake)
        assert code != 0 and said.count(wanted) == 1 and said.count("error: ") == 1, said


def agent(nodes: str) -> list[str]:
    """torchrun as on one of several machines, as the README has it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [*TORCHRUN, f"--nnodes={nodes}", "--nproc_per_node=1", "--max_restarts=2", "--monitor_interval=0.2",
            "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1"]  # fmt: skip


def test_agents_of_two_machines_train_one_model_and_start_anew_after_a_kill(
    tmp_path: Path, command: list[str]
) -> None:
    path, torchrun = tmp_path / "run", agent("2")
    command = [*command, "train.steps=300", "train.save_interval=10", f"run_dir={path}", "resume=auto"]
    with (
        started(tmp_path, *torchrun, *command, log="first") as first,
        started(tmp_path, *torchrun, *command, log="second") as second,
    ):
        wait_for(lambda: bool(checkpoint.newest_first(path)))
        children = subprocess.run(
            ["pgrep", "-P", str(second.pid), "-f", "train.py"], capture_output=True, text=True, check=True
        )
        os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
        assert first.wait(120) == 0 and second.wait(120) == 0, (tmp_path / "first").read_text()
    said = (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
    assert said.count("on 2 processes") == 2 and said.count("Resuming") == 1, said
    assert [row["step"] for row in lines(path)] == list(range(1, 301))


@pytest.mark.slow
def test_agent_that_is_left_alone_goes_on_from_the_last_checkpoint(
    tmp_path: Path, command: list[str]
) -> None:
    path, torchrun = tmp_path / "run", agent("1:2")
    command = [*command, "train.steps=3000", "train.save_interval=10", f"run_dir={path}", "resume=auto"]
    (endpoint,) = (argument.split("=")[1] for argument in torchrun if "endpoint" in argument)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("localhost", int(endpoint.split(":")[1]))) == 0

    with ExitStack() as stack:
        first = stack.enter_context(started(tmp_path, *torchrun, *command, log="first"))
        wait_for(listens)  # that where the others meet is the first machine, which is not the one to be lost
        second = stack.enter_context(started(tmp_path, *torchrun, *command, log="second"))
        wait_for(lambda: bool(checkpoint.newest_first(path)), 120)
        second.kill()
        second.wait()
        assert first.wait(300) == 0, (tmp_path / "first").read_text()
    said = (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
    assert said.count("on 2 processes") == 1 and said.count("Resuming") == 1, said
    assert [row["step"] for row in lines(path)] == list(range(1, 3001))


def test_ranks_share_every_batch_and_refuse_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks = Ranks()
    ranks.check_divides(12, 2)
    ranks.check_divides(12, 100)  # more than there are: all at once
    for batch_size, micro, near in [(8, None, "6 or 9"), (12, 3, "9 or 18"), (2, None, "3")]:
        with pytest.raises(UserError, match=f"train.batch_size={near}$"):
            ranks.check_divides(batch_size, micro)


def test_gradients_are_exchanged_once_a_step_and_are_those_of_one_process(tmp_path: Path) -> None:
    model = tiny_gpt(POSITIONS["rope"]).train()
    batch = torch.randint(0, 257, (4, 2, 16))
    precision = torch.autocast("cpu", enabled=False)
    loss = accumulate(model, batch, 1, lambda: precision)  # type: ignore[arg-type]
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        exchanged: list[int] = []

        def count(bucket: Any) -> Any:
            exchanged.append(bucket.buffer().numel())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        # torch reads annotations, which are strings here
        parallel.register_comm_hook(None, lambda state, bucket: count(bucket))
        assert accumulate(parallel, batch, 1, lambda: precision) == pytest.approx(loss)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    assert sum(exchanged) == sum(p.numel() for p in model.parameters())
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
