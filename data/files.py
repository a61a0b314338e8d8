"""Files that survive a kill, and files that are read by position."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from model.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file so that a kill or a full disk leaves either the old file or the new one.

    Raises OSError with the name of the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError whatever is wrong with it, nesting without an end included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class File:
    """A shard file that is read by position.

    Not a memory map: resident memory stays level however long a training lasts, and a file that is cut short
    meanwhile is an error instead of a crash.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: not readable ({error})") from None

    def read(self, start: int, size: int) -> bytes:
        """Bytes [start, start + size). Raises UserError when the file ends before."""
        parts: list[bytes] = []
        while size:  # the system hands over at most 2 GB a call
            part = os.pread(self._descriptor, size, start)
            if not part:
                raise UserError(f"{self._path}: was cut short while in use; prepare the data again")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
