"""What a forward pass keeps for the backward pass: the memory of training that an encoding can change."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from model.evaluation.perplexity import target_losses
from model.gpt import GPT


def saved_bytes(model: GPT, ids_BT: Tensor, autocast: partial[torch.autocast]) -> int:
    """Bytes that autograd keeps of one forward with its loss on `ids_BT` (B, T), each storage once.

    Parameters are left out, and so are optimizer states and what kernels use for a moment, which a profiler of the
    device would see. It is the same on each run, and differs between devices where their attention kernels do.
    """
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # tensors, lest a storage be freed and its place taken by another

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in held:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
        target_losses(model, ids_BT, ids_BT)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
