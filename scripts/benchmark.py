"""Time variants in turn in one process: `python scripts/benchmark.py what=train`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import yaml
from pydantic import PositiveInt

from data.benchmark import OPENWEBTEXT_BYTES, loading, tokenizing
from model import launch
from model.config import CONF, GPTConfig, Strict, UserError, to_path, validate

FILES = {path.stem: path for path in sorted((CONF / "position").glob("*.yaml"))}
# NoPE first, for the others are compared with it
LONGEST_BIAS = 8192  # tokens: about a gigabyte with four heads
POSITIONS = {
    name: {k: v for k, v in yaml.safe_load(FILES[name].read_text()).items() if k != "defaults"}
    for name in sorted(FILES, key=lambda n: n != "none")
}


class BenchmarkConfig(Strict):
    what: Literal["train", "position", "decode", "tokenize", "loader", "evaluate"]
    n_layer: PositiveInt
    n_head: PositiveInt
    n_embd: PositiveInt
    context_length: PositiveInt
    vocab_size: PositiveInt
    batch_size: PositiveInt
    repeats: PositiveInt
    megabytes: PositiveInt
    threads: PositiveInt | None
    device: str
    out: str


def main(values: dict[str, Any]) -> None:
    config = validate(BenchmarkConfig, values)
    shape = {key: values[key] for key in ("n_layer", "n_head", "n_embd", "context_length")}
    model_config = validate(GPTConfig, shape)
    import torch

    from model.training.device import keep_freed_memory, pick_device
    from model.training.run_dir import environment, write_json

    if config.threads:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    device = pick_device(config.device)
    with VARIANTS[config.what](config, model_config, device) as (variants, unit, count):
        rows = compare(variants, config.repeats, unit, count, warmups=0 if config.what == "tokenize" else 2)
    launch.print_table(rows, title=f"{config.what} on {device}, {torch.get_num_threads()} threads")
    if config.what == "tokenize":
        print(openwebtext_estimate(rows[1]["MB/s"], torch.get_num_threads()))
    out = to_path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out}: cannot be made ({error}); give another folder") from None
    write_json(out / f"{config.what}.json", {"config": values, "environment": environment(), "rows": rows})


def compare(
    variants: dict[str, Callable[[], None]], repeats: int, unit: str, count: dict[str, float], warmups: int
) -> list[dict[str, Any]]:
    """Run the variants in turn, `repeats` times each after the warm-ups; the first is what others are compared to.

    Ratios are medians of the ratios within one turn, so a machine that slows down slows both sides.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-warmups, repeats):
        print(f"turn {turn + warmups + 1} of {repeats + warmups}", flush=True)
        for name, run in variants.items():
            began = time.perf_counter()
            run()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    first = next(iter(seconds.values()))
    return [
        {
            "variant": name,
            "median ms": statistics.median(times) * 1e3,
            "min ms": min(times) * 1e3,
            unit: count[name] / statistics.median(times) if name in count else None,
            "time / first": statistics.median(t / f for t, f in zip(times, first, strict=True)),
        }
        for name, times in seconds.items()
    ]


def build_gpt(config: BenchmarkConfig, shape: GPTConfig, position: str, device: Any) -> Any:
    import torch

    from model.gpt import GPT
    from model.position import build

    torch.manual_seed(0)
    return GPT(shape, config.vocab_size, build(POSITIONS[position], shape.dims)).to(device)


def has_bias(model: Any) -> bool:
    """Whether its encoding adds a number to each score, and so needs one for every query and key."""
    import torch

    from model.position import Span

    place = torch.arange(2, device=next(model.parameters()).device)
    return model.position.score_bias(model.position.prepare(Span(place, place, 2))) is not None


def training_step(config: BenchmarkConfig, model: Any, device: Any, precision: str) -> Callable[[], None]:
    """One forward, backward and AdamW update on random tokens."""
    import torch

    from model.evaluation.perplexity import token_losses
    from model.training.device import autocast
    from model.training.optim import clip_gradients

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    windows = torch.randint(config.vocab_size, (config.batch_size, config.context_length + 1), device=device)
    in_precision = autocast(device, precision)

    def step() -> None:
        with in_precision():
            loss = token_losses(model, windows).mean()
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


# what to time by name, the unit of its rate, and by name how many of these units one run is
Variants = Iterator[tuple[dict[str, Callable[[], None]], str, dict[str, float]]]


@contextmanager
def train_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    steps = {
        precision: training_step(config, build_gpt(config, shape, "rope", device), device, precision)
        for precision in ("fp32", "auto")
    }
    yield steps, "tokens/s", dict.fromkeys(steps, config.batch_size * config.context_length)


@contextmanager
def position_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    """A training step of each encoding, and of ALiBi as a mask, which is what its features save."""
    from model.position.alibi import ALiBi, slopes

    class MaskedALiBi(ALiBi):
        def prepare(self, span: Any) -> Any:
            return slopes(self.n_head).float().to(span.q.device)[:, None, None] * (span.k - span.q[:, None])

        def encode_qk(self, q_BHTD: Any, k_BHTD: Any, state: Any) -> Any:
            return q_BHTD, k_BHTD

        def score_bias(self, state: Any) -> Any:
            return state

    models = {name: build_gpt(config, shape, name, device) for name in POSITIONS}
    models["alibi as a mask"] = build_gpt(config, shape, "alibi", device)
    models["alibi as a mask"].position = MaskedALiBi(shape.dims)
    steps = {name: training_step(config, model, device, "auto") for name, model in models.items()}
    yield steps, "tokens/s", dict.fromkeys(steps, config.batch_size * config.context_length)


@contextmanager
def decode_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    """200 greedy tokens at batch 1, up to the context length, with and without the cache."""
    from model.generate import Sampling, generate

    new = min(200, config.context_length - 1)
    model = build_gpt(config, shape, "rope", device).eval()
    prompt = [token % config.vocab_size for token in range(config.context_length - new)]

    def decode(cache: bool) -> Callable[[], None]:
        sampling = Sampling(max_new_tokens=new, temperature=0, cache=cache)

        def run() -> None:
            for _ in generate(model, [prompt], sampling):
                pass

        return run

    yield {"cache": decode(True), "no cache": decode(False)}, "tokens/s", {"cache": new, "no cache": new}


@contextmanager
def tokenize_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    with tokenizing(config.megabytes, config.threads) as (variants, n_bytes):
        yield variants, "MB/s", dict.fromkeys(variants, n_bytes / 1e6)


def openwebtext_estimate(rate: float, cores: int) -> str:
    """How long OpenWebText would take if the rate grew with the cores, which is not measured here."""
    minutes = [OPENWEBTEXT_BYTES / (rate / cores * 1e6 * n) / 60 for n in (16, 64)]
    return (
        f"{rate / cores:.1f} MB/s a core: OpenWebText, {OPENWEBTEXT_BYTES / 1e9} GB of text, would take "
        f"{minutes[0]:.1f} minutes on 16 such cores and {minutes[1]:.1f} on 64 (extrapolated)"
    )


@contextmanager
def loader_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    """A training step of model=mini on a batch, and the loading of that batch."""
    mini = validate(GPTConfig, yaml.safe_load((CONF / "model/mini.yaml").read_text()))
    of_mini = config.model_copy(update={"context_length": mini.context_length})
    step = training_step(of_mini, build_gpt(of_mini, mini, "rope", device), device, "auto")
    with loading(mini.context_length, config.batch_size) as variants:
        steps = {"a training step of model=mini": step, "a batch from the loader": variants["batch"]}
        others = {"opening 1,000 shards": variants["opening"]}
        yield steps | others, "tokens/s", dict.fromkeys(steps, config.batch_size * mini.context_length)


@contextmanager
def evaluate_variants(config: BenchmarkConfig, shape: GPTConfig, device: Any) -> Variants:
    """The loss of one window under each encoding, against the matrix products and the attention kernel alone."""
    import torch
    import torch.nn.functional as F

    from model.evaluation.perplexity import token_losses

    ids = torch.randint(config.vocab_size, (1, config.context_length + 1), device=device)

    def loss_of(model: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                token_losses(model, ids)

        return run

    models = {name: build_gpt(config, shape, name, device).eval() for name in POSITIONS}
    for name in [
        name for name, model in models.items() if has_bias(model) and len(ids[0]) > LONGEST_BIAS + 1
    ]:
        print(
            f"{name} is left out: memory for its bias grows with the square of context_length={ids.shape[1] - 1}"
        )
        del models[name]
    plain = models["none"]
    x_TC = torch.randn(config.context_length, config.n_embd, device=device)

    def bare() -> None:
        with torch.no_grad():
            for block in plain.blocks:
                q, k, v = (
                    F.linear(x_TC, block.attn.qkv.weight)
                    .unflatten(-1, (3, config.n_head, -1))
                    .permute(1, 2, 0, 3)
                )
                y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
                F.linear(y[0].transpose(0, 1).flatten(1), block.attn.proj.weight)
                F.linear(F.linear(x_TC, block.mlp.fc.weight), block.mlp.proj.weight)
            F.linear(x_TC, plain.embedding.weight)

    variants = {"attention and matrix products alone": bare} | {
        name: loss_of(m) for name, m in models.items()
    }
    yield variants, "tokens/s", dict.fromkeys(variants, config.context_length)


VARIANTS = {
    "evaluate": evaluate_variants,
    "train": train_variants,
    "position": position_variants,
    "decode": decode_variants,
    "tokenize": tokenize_variants,
    "loader": loader_variants,
}


if __name__ == "__main__":
    launch.main("benchmark", main)
