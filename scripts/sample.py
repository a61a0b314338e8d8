"""Generate from a trained run: `python scripts/sample.py run=<run_dir> prompt="In the beginning"`."""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from data import tokenizer
from model import launch
from model.config import LogitScale, Strict, UserError, to_path, validate


class SampleConfig(Strict):
    run: str
    checkpoint: Literal["last", "best"]
    prompt: str | list[str]
    prompt_ids: list[NonNegativeInt] | None
    num_samples: PositiveInt
    logit_scale: LogitScale | None
    device: str
    out: str | None


def main(values: dict[str, Any]) -> None:
    given = values.pop("position", None)
    config = validate(SampleConfig, {key: values.pop(key) for key in SampleConfig.model_fields})
    # imported here, so that --help and a mistyped key are answered without loading torch
    from model.generate import Sampling, generate
    from model.load import load_run
    from model.training.device import pick_device
    from model.training.run_dir import write_json

    sampling = validate(Sampling, values)
    out = to_path(config.out) if config.out else None
    if out is not None and out.exists():
        raise UserError(f"out={out}: exists; give another name")
    if config.prompt and config.prompt_ids is not None:
        raise UserError("prompt and prompt_ids are both given; give one of them")
    run, model, *_ = load_run(
        to_path(config.run), config.checkpoint, launch.chosen_scaling(given), config.logit_scale
    )
    model.to(pick_device(config.device))
    encoding, end_of_text = None, model.vocab_size - 1
    if config.prompt_ids is None:
        encoding = tokenizer.load(run.tokenizer.name)
        texts = [config.prompt] if isinstance(config.prompt, str) else config.prompt
        prompts = [encoding.encode_ordinary(text) or [end_of_text] for text in texts]
    else:
        prompts, texts = [list(config.prompt_ids)], [" ".join(map(str, config.prompt_ids))]
        try:
            encoding = tokenizer.load(run.tokenizer.name)
        except UserError as error:
            print(f"warning: showing token ids ({error})", file=sys.stderr)

    def text_of(tokens: list[int]) -> str:
        return " ".join(map(str, tokens)) if encoding is None else "".join(tokenizer.stream(encoding, tokens))

    def show(text: str) -> None:
        print(text, end="", flush=True)

    rows = [(i, offset) for i in range(len(prompts)) for offset in range(config.num_samples)]
    new: list[list[int]] = [[] for _ in rows]
    live = tokenizer.TextStream(encoding) if encoding is not None else None
    began = time.perf_counter()
    # the first row streams; a terminal has one cursor, so the others are shown when all are done
    steps = generate(
        model,
        [prompts[i] for i, _ in rows],
        sampling,
        end_of_text,
        [sampling.seed + offset for _, offset in rows],
    )
    opening = ("--- sample 1\n" if len(rows) > 1 else "") + texts[0] + ("" if live else " ")
    for step in steps:
        show(opening)
        opening = ""
        for tokens, token in zip(new, step, strict=True):
            if token is not None and token != end_of_text:
                tokens.append(token)
        if step[0] is not None and step[0] != end_of_text:
            show(live.push(step[0]) if live else f"{step[0]} ")
    seconds = time.perf_counter() - began
    show((live.close() if live else "") + "\n")
    for number, (tokens, (i, _)) in enumerate(zip(new[1:], rows[1:], strict=True), start=2):
        show(f"--- sample {number}\n{texts[i]}{'' if live else ' '}{text_of(tokens)}\n")
    count = sum(map(len, new))
    print(f"\n{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens/s", file=sys.stderr)
    if out is not None:
        samples = [
            {"prompt": texts[i], "text": text_of(tokens), "tokens": tokens, "seed": sampling.seed + offset}
            for tokens, (i, offset) in zip(new, rows, strict=True)
        ]
        write_json(out, {"run": config.run, "tokens_per_s": count / seconds, "samples": samples})


if __name__ == "__main__":
    launch.main("sample", main)
