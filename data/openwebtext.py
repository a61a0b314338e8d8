"""OpenWebText (Gokaslan and Cohen 2019) from the Hugging Face hub: .parquet files with a column `text`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data.files import write_atomically
from model.config import UserError

REPOSITORY = "Skylion007/openwebtext"
REVISIONS = ("main", "refs/convert/parquet")  # the second is the hub's own conversion
N_FILES = 80
N_DOCUMENTS, N_TOKENS = (
    8_013_769,
    9_040_000_000,
)  # of all files; tokens by GPT-2's tokenizer, from nanoGPT's README
AT_ONCE = 4


def fetch(folder: Path, n_files: int | None) -> Iterator[Path]:
    """The files in order, each once it is here; some are fetched ahead. They stay in the hub's cache.

    `folder` keeps the list and the revision, so that an interrupted preparation goes on with the same files.
    Raises UserError when the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # four at once would write over each other, and over ours
    try:
        kept = folder / "files.json"
        if not kept.exists():
            write_atomically(kept, json.dumps(_list()).encode())
        revision, names = json.loads(kept.read_text())
        if n_files is not None and n_files > len(names):
            raise UserError(f"data.shards={n_files}: OpenWebText has {len(names)} files; give that or fewer")
        names = names[:n_files]
        print(f"Fetching {len(names)} files of {REPOSITORY} at {revision[:12]}", flush=True)

        def download(name: str) -> Path:
            return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset", revision=revision))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            ahead = deque(pool.submit(download, name) for name in names[:AT_ONCE])
            for number in range(1, len(names) + 1):
                path = ahead.popleft().result()
                print(f"Fetched {number} of {len(names)}: {path.name}", flush=True)
                yield path
                ahead.extend(pool.submit(download, name) for name in names[number + AT_ONCE - 1 :][:1])
    except UserError:
        raise
    except Exception as error:  # of several HTTP libraries
        raise UserError(
            f"OpenWebText: not to be had from the hub ({' '.join(str(error).split())[:200]}); check the network, or "
            f"fetch the .parquet files of {REPOSITORY} elsewhere and give data.path=<their folder>"
        ) from None


def _list() -> tuple[str, list[str]]:
    from huggingface_hub import HfApi

    for branch in REVISIONS:
        info = HfApi().dataset_info(REPOSITORY, revision=branch)
        names = sorted(file.rfilename for file in info.siblings or [] if file.rfilename.endswith(".parquet"))
        if names:
            return str(info.sha), names
    raise UserError(
        f"OpenWebText: {REPOSITORY} has no .parquet files any more; give data.path=<a folder of them>"
    )
