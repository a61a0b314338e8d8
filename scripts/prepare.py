"""Turn text into shards: `python scripts/prepare.py data=text data.path=books/`."""

from __future__ import annotations

from typing import Any

from data.loader import TokenStream
from data.prepare import prepare
from data.sources import DataConfig
from model import launch
from model.config import Strict, validate
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
            if config.verify:
                shard.verify()
            row = {"shard": shard.path.name, "documents": len(shard.offsets), "tokens": len(shard.tokens)}
            rows.append(row | {"tokenizer": shard.tokenizer, "sha256": shard.sha256[:16]})
    launch.print_table(rows, title=str(folder) + (", checksums verified" if config.verify else ""))


if __name__ == "__main__":
    launch.main("prepare", main)
