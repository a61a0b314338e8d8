"""OpenWebText from a hub: the real client against a small server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare
from data import openwebtext
from data.sources import DataConfig
from model.config import UserError
from tests.conftest import ROOT
from tests.data import corpus

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = [f"plain_text/train-{i:05d}-of-00003.parquet" for i in range(3)]


class Hub(BaseHTTPRequestHandler):
    """The three routes that the client uses: a revision's files, and a file's head and body."""

    files: dict[str, bytes]
    branches: tuple[str, ...]  # those that hold the files
    broken_after: int | None  # a body of more bytes breaks off there, once
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        self.requests.append(f"{self.command} {path}")
        if path.startswith("/api/datasets/Skylion007/openwebtext/revision/"):
            branch = path.split("/revision/")[1]
            names = [*self.files, "README.md"] if branch in self.branches else ["README.md"]
            info = {
                "id": "Skylion007/openwebtext",
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in names],
            }
            content = json.dumps(info).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
        elif path.startswith(prefix := f"/datasets/Skylion007/openwebtext/resolve/{COMMIT}/"):
            content = self.files[path.removeprefix(prefix)]
            start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            content = content[start:]
        else:
            content = b""
            self.send_response(404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            limit, self.__class__.broken_after = (
                (self.broken_after, None)
                if self.broken_after is not None and len(content) > self.broken_after
                else (len(content), self.broken_after)
            )
            self.wfile.write(content[:limit])
            if limit < len(content):
                self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    Hub.files, Hub.branches, Hub.broken_after, Hub.requests = {}, ("main",), None, []
    for i, name in enumerate(NAMES):
        pq.write_table(
            pa.table({"text": corpus.DOCUMENTS[i * 40 : i * 40 + 40]}), tmp_path / "x", row_group_size=9
        )
        Hub.files[name] = (tmp_path / "x").read_bytes()
    (tmp_path / "x").unlink()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.address = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    yield Hub
    server.shutdown()


def prepare(hub: type[Hub], cwd: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,  # type: ignore[attr-defined]
        "HF_HOME": str(cwd / "hub-cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), "data=openwebtext", "tokenizer=bytes"]
    result = subprocess.run(
        [*command, "data.val_fraction=0.2", "data.workers=1", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    return result


@pytest.mark.parametrize("branch", ["main", "refs/convert/parquet"])
def test_files_are_fetched_tokenized_and_not_asked_for_again(
    tmp_path: Path, hub: type[Hub], branch: str
) -> None:
    hub.branches = (branch,)
    said = prepare(hub, tmp_path, "data.shards=null").stdout
    assert "about 8,013,769 documents: 9.04 B tokens by GPT-2's tokenizer, 16.8 GiB" in said
    assert "Fetching 3 files of Skylion007/openwebtext at 0123456789ab" in said and "Fetched 3 of 3" in said
    folder = tmp_path / "shards/openwebtext-bytes"
    found = corpus.texts(folder, "train") + corpus.texts(folder, "val")
    assert sorted(found) == sorted(corpus.DOCUMENTS)
    assert {path.name for path in folder.iterdir()} == {"meta.json", "train-00000.bin", "val-00000.bin"}
    n_requests = len(hub.requests)
    prepare(hub, tmp_path)
    assert len(hub.requests) == n_requests


def test_only_the_files_asked_for_are_fetched(tmp_path: Path, hub: type[Hub]) -> None:
    prepare(hub, tmp_path, "data.shards=2")
    folder = tmp_path / "shards/openwebtext-2-bytes"
    found = corpus.texts(folder, "train") + corpus.texts(folder, "val")
    assert sorted(found) == sorted(corpus.DOCUMENTS[:80])
    assert not any(NAMES[2] in request for request in hub.requests)
    assert (
        "OpenWebText has 3 files; give that or fewer"
        in prepare(hub, tmp_path, "data.shards=4", code=2).stderr
    )


def test_split_of_a_document_is_the_same_for_more_files(tmp_path: Path, hub: type[Hub]) -> None:
    for shards in (1, 3):
        prepare(hub, tmp_path, f"data.shards={shards}")
    few = set(corpus.texts(tmp_path / "shards/openwebtext-1-bytes", "val"))
    many = set(corpus.texts(tmp_path / "shards/openwebtext-3-bytes", "val"))
    assert few and few == many & set(corpus.DOCUMENTS[:40])


def test_download_that_broke_off_is_asked_for_again(tmp_path: Path, hub: type[Hub]) -> None:
    hub.broken_after = 1500
    prepare(hub, tmp_path)
    folder = tmp_path / "shards/openwebtext-bytes"
    assert len(corpus.texts(folder, "train") + corpus.texts(folder, "val")) == len(corpus.DOCUMENTS)
    assert sum(request.startswith("GET /datasets/") for request in hub.requests) == len(NAMES) + 1


def test_without_the_hub_it_says_what_to_do(tmp_path: Path, hub: type[Hub]) -> None:
    hub.address = "http://127.0.0.1:9"  # type: ignore[attr-defined]
    error = prepare(hub, tmp_path, code=2).stderr
    assert error.startswith("error: OpenWebText: not to be had from the hub")
    assert "give data.path=<their folder>" in error and len(error.splitlines()) == 1


def test_hub_without_parquet_is_one_sentence(tmp_path: Path, hub: type[Hub]) -> None:
    hub.branches = ()
    assert "has no .parquet files any more" in prepare(hub, tmp_path, code=2).stderr


def test_disk_too_small_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**30))
    config = DataConfig(source="openwebtext", shards=40, val_fraction=0.0005)
    with pytest.raises(UserError, match=r"shards: 1.0 GiB free, about 8 needed.*data.out=, or fewer files"):
        data.prepare.prepare(config, "gpt2")


def test_only_a_few_files_are_fetched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def download(repository: str, name: str, **options: object) -> str:
        started.append(name)
        return name

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (tmp_path / "files.json").write_text(json.dumps([COMMIT, [f"{i}.parquet" for i in range(80)]]))
    files = openwebtext.fetch(tmp_path, None)
    assert [next(files).name for _ in range(3)] == ["0.parquet", "1.parquet", "2.parquet"]
    time.sleep(0.1)
    assert len(started) <= 3 + openwebtext.AT_ONCE
    assert [path.name for path in files] == [f"{i}.parquet" for i in range(3, 80)]
