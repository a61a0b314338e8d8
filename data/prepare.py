"""Text to shards: tokenize each document, end it with one end-of-text token, write a folder at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data import sources, tokenizer
from data.shards import open_shard, write_atomically, write_shard
from data.sources import DataConfig
from model.config import UserError


def prepare(config: DataConfig, tokenizer_name: str, say: Callable[[str], None] = print) -> Path:
    """The folder of shards for this data and tokenizer; made when it is not there yet.

    The folder appears by one rename, so a kill or a second process leaves no half-written shards. Raises
    UserError when the source is missing, or `data.out` holds shards of another tokenizer.
    """
    if config.source == "bin":
        return Path(str(config.path)).expanduser()
    name = sources.describe(config)
    folder = Path(config.out).expanduser() if config.out else Path("shards") / f"{name}-{tokenizer_name}"
    if folder.is_dir() and any(folder.iterdir()):
        _check_made_from(folder, name, tokenizer_name)
        return folder
    say(f"Preparing {name} with tokenizer {tokenizer_name} in {folder}")
    encoding = tokenizer.load(tokenizer_name)
    documents: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for part, text in sources.documents(config):
        # encode_ordinary: text that looks like a special token is text
        documents[part].append(np.array([*encoding.encode_ordinary(text), encoding.eot_token]))
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for split, tokens in documents.items():
            write_shard(
                temporary / f"{split}-00000.bin",
                tokens,
                tokenizer=tokenizer_name,
                tokenizer_hash=tokenizer.fingerprint(encoding),
                vocab_size=encoding.n_vocab,
            )
        table = {
            "source": name,
            "tokenizer": tokenizer_name,
            "bytes_per_token": tokenizer.bytes_per_token(encoding).tolist(),
        }
        write_atomically(temporary / "meta.json", json.dumps(table).encode())
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "meta.json").exists():  # else another process was first, with the same bytes
                raise
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write shards there ({error}); give another folder as data.out="
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    counts = ", ".join(f"{split} {sum(map(len, tokens)):,} tokens" for split, tokens in documents.items())
    say(f"Prepared {counts}")
    return folder


def _check_made_from(folder: Path, name: str, tokenizer_name: str) -> None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        made_from = (meta["source"], meta["tokenizer"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{folder}: exists, but is not a folder of shards; give another data.out=") from None
    if made_from != (name, tokenizer_name):
        raise UserError(
            f"{folder}: holds {made_from[0]} with tokenizer {made_from[1]}, not {name} with {tokenizer_name}; "
            f"give another data.out= or delete the folder"
        )
    for shard in sorted(folder.glob("*.bin")):
        open_shard(shard)
