"""Turn text into shards: `python scripts/prepare.py data=text data.path=books/`."""

from __future__ import annotations

from typing import Any

from data.describe import length_table, quantiles, shard_table
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
    describe: bool


def main(values: dict[str, Any]) -> None:
    config = validate(PrepareConfig, values)
    folder = prepare(config.data, config.tokenizer.name)
    streams = [TokenStream(folder, split) for split in ("train", "val")]
    for stream in streams:
        stream.check_fits(config.tokenizer.name, 1)
    rows = [row for s in streams for row in shard_table(s, config.tokenizer.name, config.verify)]
    recorded = all(shard.tokenizer for stream in streams for shard in stream.shards)
    found = "every byte as recorded" if recorded else "no checksums recorded to compare with"
    launch.print_table(rows, title=f"{folder}{', ' + found if config.verify else ''}")
    if config.describe:
        for stream in streams:
            print(quantiles(stream, config.tokenizer.name))
            launch.print_table(length_table(stream, config.tokenizer.name))


if __name__ == "__main__":
    launch.main("prepare", main)
