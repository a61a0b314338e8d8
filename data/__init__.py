"""From text to batches: sources, tokenizers, shards, preparation, loader. Importing this loads no torch."""
