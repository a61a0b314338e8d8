"""Results in a JSON file that grows row by row, so that an evaluation that was stopped computes nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.files import parse_json
from model.training.run_dir import write_json

Row = dict[str, Any]


class Kept:
    """The rows of `file`; none when it is absent or something else. `new` counts those added since."""

    def __init__(self, file: Path) -> None:
        self.file, self.new = file, 0
        try:
            rows = parse_json(file.read_text())["scores"]
            self.rows: list[Row] = [row for row in rows if isinstance(row, dict) and "skipped" not in row]
        except (OSError, ValueError, KeyError, TypeError):
            self.rows = []

    def find(self, settings: Row) -> Row | None:
        """The newest row with all of `settings`."""
        same = (row for row in reversed(self.rows) if all(row.get(k) == v for k, v in settings.items()))
        return next(same, None)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        self.new += 1
        write_json(self.file, {"scores": self.rows})
        return row
