"""What the hidden states of a frozen model know about absolute position: a probe for each layer.

Shape suffixes: W windows, B batch, T tokens of a window, C width, N tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import TokenStream
from model.config import UserError
from model.gpt import GPT
from model.load import build_model
from model.training.config import RunConfig

HELD_TOKENS = 4096  # tokens whose T-way logits are held at once, so that memory does not grow with the batch


def probe_positions(
    model: GPT,
    train_windows: Tensor,
    test_windows: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Haviv et al. 2022 (arXiv 2203.16634, section 5): train a probe on each layer, and test it on other text.

    Layer 0 is what enters the first block, layer l the output of block l: the residual stream before any norm, divided
    by one number a layer, its root mean square, since training makes the stream larger, and one learning rate has to
    suit the layers of a trained and of an untrained model. A probe is ReLU(h W1) W2, C to 2C to T, without biases,
    trained for `steps` steps of Adam on the cross entropy of the index of each token in its window, over `batch_size`
    windows of `train_windows` (W, T) a step. All probes see the same batches; one forward of the model serves them.

    A row per layer, over all tokens of `test_windows` (W', T): `mad`, the mean absolute distance in tokens from
    the most likely index to the true one, `mad_over_length`, which is `mad` / T, and `accuracy`, the part of
    indices that are met exactly. Guesses at random give a `mad_over_length` of 1/3, the constant guess of the
    middle 1/4. A causal model without any training is far below that (Chi et al. 2023, arXiv 2305.13571): compare
    with the rows of `untrained`. Nothing of `model` changes, and the global random state is not touched.

    Raises UserError when the two do not have windows of one length, or share one.
    """
    _check_apart(train_windows, test_windows)
    device, T = next(model.parameters()).device, train_windows.shape[1]
    generator = torch.Generator().manual_seed(seed)
    probes = [Probe(model.config.n_embd, T, generator).to(device) for _ in range(model.config.n_layer + 1)]
    optimizer = torch.optim.Adam([weight for probe in probes for weight in probe.parameters()], lr=lr)
    training = model.training
    model.eval()
    try:
        first = hidden_states(model, train_windows[:batch_size].to(device))
        scales = [h_BTC.float().pow(2).mean().sqrt() for h_BTC in first]

        def states_of(windows_BT: Tensor) -> list[Tensor]:
            states = hidden_states(model, windows_BT.to(device))
            return [h_BTC / scale for h_BTC, scale in zip(states, scales, strict=True)]

        for rows_B in _batches(len(train_windows), steps, batch_size, generator):
            optimizer.zero_grad()
            states = states_of(train_windows[rows_B])
            for probe, h_BTC in zip(probes, states, strict=True):
                _accumulate_gradients(probe, h_BTC)
            optimizer.step()
        distance = torch.zeros(len(probes), dtype=torch.float64)
        exact = torch.zeros(len(probes), dtype=torch.float64)
        for windows_BT in test_windows.split(batch_size):
            states = states_of(windows_BT)
            for layer, (probe, h_BTC) in enumerate(zip(probes, states, strict=True)):
                off_N = _distances(probe, h_BTC)
                distance[layer] += off_N.sum().item()
                exact[layer] += (off_N == 0).sum().item()
    finally:
        model.train(training)
    mad, accuracy = distance / test_windows.numel(), exact / test_windows.numel()
    return [
        {"layer": layer, "mad": m, "mad_over_length": m / T, "accuracy": a}
        for layer, (m, a) in enumerate(zip(mad.tolist(), accuracy.tolist(), strict=True))
    ]


class Probe(nn.Module):
    """Haviv et al. 2022, appendix C: logits ReLU(h W1) W2 over the T indices, C to 2C to T, without biases."""

    def __init__(self, n_embd: int, length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape), generator=generator))
            for shape in ((2 * n_embd, n_embd), (length, 2 * n_embd))
        )

    def forward(self, h_NC: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(h_NC, self.up)), self.down)


@torch.no_grad()
def hidden_states(model: GPT, ids_BT: Tensor) -> list[Tensor]:
    """What enters the first block and what leaves each, `n_layer` + 1 tensors (B, T, C), from one forward."""
    found: list[Tensor] = []
    blocks = list(model.blocks)
    hooks = [blocks[0].register_forward_pre_hook(lambda _, arguments: found.append(arguments[0]))]
    hooks += [block.register_forward_hook(lambda _, arguments, out: found.append(out)) for block in blocks]
    try:
        model.hidden(ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def cut_windows(stream: TokenStream, count: int, length: int) -> Tensor:
    """`count` windows of `length` tokens, (count, length) int64, evenly spaced over the stream and apart.

    No random draw: they depend on the text alone. They start anywhere in a document, as those of training do,
    or the place of a token could be read from how documents begin. Raises UserError when the stream is too short.
    """
    spacing = len(stream) // count
    if spacing < length:
        raise UserError(
            f"{stream.folder}: the {stream.split} split has {len(stream)} tokens, too few for {count} windows of "
            f"{length}; ask for {len(stream) // length} or fewer"
        )
    return torch.from_numpy(np.stack([stream.read(i * spacing, length) for i in range(count)]))


def train_and_test_windows(
    train: TokenStream, test: TokenStream, train_count: int, test_count: int, length: int
) -> tuple[Tensor, Tensor]:
    """Windows to train probes on, and windows to test them on, from two splits that share no shard.

    Raises UserError when they share one, or when one is too short.
    """
    if {shard.sha256 for shard in train.shards} & {shard.sha256 for shard in test.shards}:
        raise UserError(
            f"{test.folder}: probes would be tested on the split that they are trained on; give another"
        )
    return cut_windows(train, train_count, length), cut_windows(test, test_count, length)


def untrained(config: RunConfig) -> GPT:
    """The model of a run with the weights of its first step, in evaluation mode: what training is compared with.

    The global random state is not touched.
    """
    with torch.random.fork_rng(devices=[]):
        return build_model(config).eval()


def _pieces(h_BTC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (N, C) in fp32 and their indices (N,), at most HELD_TOKENS at once."""
    B, T, _ = h_BTC.shape
    index_N = torch.arange(T, device=h_BTC.device).repeat(B)
    yield from zip(h_BTC.flatten(0, 1).float().split(HELD_TOKENS), index_N.split(HELD_TOKENS), strict=True)


@torch.enable_grad()
def _accumulate_gradients(probe: Probe, h_BTC: Tensor) -> None:
    """Of the mean cross entropy of the index over a batch."""
    for h_NC, index_N in _pieces(h_BTC):
        loss = F.cross_entropy(probe(h_NC), index_N, reduction="sum") / h_BTC[..., 0].numel()
        loss.backward()


@torch.no_grad()
def _distances(probe: Probe, h_BTC: Tensor) -> Tensor:
    """|most likely index - true index| of each token, (N,) int64."""
    return torch.cat([(probe(h_NC).argmax(-1) - index_N).abs() for h_NC, index_N in _pieces(h_BTC)])


def _batches(n_windows: int, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The windows of each step, (B,): all of them in a new order again and again."""
    epochs = -(-steps * batch_size // n_windows)
    order = torch.cat([torch.randperm(n_windows, generator=generator) for _ in range(epochs)])
    yield from order[: steps * batch_size].split(batch_size)


def _check_apart(train_windows: Tensor, test_windows: Tensor) -> None:
    if train_windows.shape[1] != test_windows.shape[1]:
        raise UserError(
            f"probes are trained on windows of {train_windows.shape[1]} tokens and tested on windows of "
            f"{test_windows.shape[1]}; cut both to one length"
        )
    # the same text elsewhere in a window has other positions: only a whole window can be learned by heart
    seen = set(map(tuple, train_windows.tolist()))
    shared = sum(tuple(window) in seen for window in test_windows.tolist())
    if shared:
        raise UserError(
            f"{shared} of {len(test_windows)} windows that would test the probes are among those that train them; "
            f"cut them from another text"
        )
