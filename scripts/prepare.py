"""Turn text into shards: `python scripts/prepare.py data=text data.path=books/`."""

from __future__ import annotations

from typing import Any

from data import tokenizer
from data.loader import TokenStream
from data.prepare import prepare
from data.shards import Shard
from data.sources import DataConfig
from model import launch
from model.config import Strict, UserError, validate
from model.training.config import TokenizerConfig


class PrepareConfig(Strict):
    data: DataConfig
    tokenizer: TokenizerConfig
    verify: bool


def main(values: dict[str, Any]) -> None:
    config = validate(PrepareConfig, values)
    folder = prepare(config.data, config.tokenizer.name)
    rows: list[dict[str, Any]] = []
    for split in ("train", "val"):
        for shard in TokenStream(folder, split).shards:
            row = {"shard": shard.path.name, "documents": len(shard.offsets), "tokens": len(shard.tokens)}
            row |= {"tokenizer": shard.tokenizer, "sha256": shard.sha256[:16]}
            rows.append(row | ({"verified": verified(shard)} if config.verify else {}))
    launch.print_table(rows, title=str(folder))


def verified(shard: Shard) -> str:
    """Compare the checksum and the tokenizer with what the shard records. Raises UserError when they differ."""
    if shard.tokenizer is None:
        return "nothing recorded"
    shard.verify()
    if shard.tokenizer_hash != tokenizer.fingerprint(tokenizer.load(shard.tokenizer)):
        raise UserError(
            f"{shard.path}: made with another {shard.tokenizer} than this one; prepare the data again"
        )
    return "yes"


if __name__ == "__main__":
    launch.main("prepare", main)
