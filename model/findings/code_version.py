"""A hash of the code that decides about a number, so that a result made by other code is made again."""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# the model and what it is asked to do; that the loop around them still gives the numbers on record is for a test
TRAINING = (
    "model.gpt",
    "model.attention",
    "model.kernels",
    "model.logit_scale",
    "model.position.__init__",
    "model.position.base",
    "model.position.build",
    "model.position.additive",
    "model.position.per_layer",
    "model.position.scaling",
    "model.training.optim",
    "model.evaluation.perplexity",  # the loss that is trained on, and val_loss
    "model.evaluation.windows",
    "data.masking",
    "data.tasks",
    "data.recall",
    "data.synthetic",
)


@lru_cache
def code_version(*names: str) -> str:
    """Twelve hex digits over the syntax trees of modules, or of a function as `module:function` and its constants.

    Comments, docstrings and layout do not count.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        module, _, function = name.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        if function:
            tree.body = [part for part in tree.body if _belongs(part, function)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(f"{name}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]


def _belongs(part: ast.stmt, function: str) -> bool:
    """Whether a statement of a module is the function, or what may be a constant that it uses."""
    if isinstance(part, ast.Import | ast.ImportFrom):
        return False
    return getattr(part, "name", function) == function
