"""Is it safe to let torch read a file? `weights_only` keeps it from running code, not from filling memory."""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

# what a checkpoint consists of; torch would also make a bytearray of any size, and some more
TYPES = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage")
DEEPEST_TUPLE = 10


def check_archive(path: Path) -> None:
    """Raises ValueError or BadZipFile unless `path` is an intact zip of plain tensors, no larger than it looks."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("compressed, and could unpack to any size")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its entries overlap")
        names = [entry.filename.lower() for entry in entries]  # torch finds a name in either case
        if len(set(names)) < len(names):
            raise ValueError("holds two entries of one name")
        broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} fails its checksum")
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                _check_pickle(archive.read(entry))


def _check_pickle(content: bytes) -> None:
    """Follow the stack of a pickle without making anything: which types it asks for, how deep its tuples are.

    A tuple can be a key, and is then hashed through and through: shared or nested often enough, without an end.
    """
    stack: list[Any] = []  # the depth of each tuple on it, 0 for anything else
    memo: dict[Any, int] = {}
    mark = object()
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if "GLOBAL" in name and not TYPES.fullmatch(str(argument)):
            raise ValueError(f"asks for {argument}")
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            continue
        if name.endswith("BINGET") or name == "GET":
            stack.append(memo[argument])
            continue
        takes = len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:
            at = len(stack) - 1 - stack[::-1].index(mark)
            takes = len(stack) - at + opcode.stack_before.index(pickletools.markobject)
        taken = [depth for depth in stack[len(stack) - takes :] if depth is not mark]
        del stack[len(stack) - takes :]
        depth = 0
        if name.startswith("TUPLE") or name == "DUP":
            depth = max(taken, default=0) + name.startswith("TUPLE")
        if depth > DEEPEST_TUPLE:
            raise ValueError("nests tuples without an end")
        stack += [mark if made is pickletools.markobject else depth for made in opcode.stack_after]
