"""Where a run computes, and in which precision."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from model.config import UserError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h


def pick_device(name: str, key: str = "device") -> torch.device:
    """`auto` is CUDA, then Apple's MPS, then the CPU. Raises UserError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda", "mps"}:
        raise UserError(f"{key}={name}: not available on this machine; give auto, cpu, cuda or mps")
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether the processor multiplies bf16 itself; emulated, it would be slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def autocast(device: torch.device, precision: str) -> partial[torch.autocast]:
    """A factory of contexts that compute in bf16 (`bf16`, or `auto` where the processor has it) or fp32."""
    bf16 = precision == "bf16" or (precision == "auto" and has_bf16(device))
    return partial(torch.autocast, device.type, torch.bfloat16, enabled=bf16)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the kernel.

    A training step frees and asks for the same large blocks each time. By default each becomes a fresh
    mapping that the kernel must zero page by page: about a quarter of a CPU step. Elsewhere than on glibc
    nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28)):
        mallopt(option, value)
