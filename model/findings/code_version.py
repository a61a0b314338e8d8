"""A hash of the code that decides about a number, so that a result made by other code is made again."""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINING = (
    "train",
    "model.gpt",
    "model.attention",
    "model.kernels",
    "model.logit_scale",
    "model.load",
    "model.position.base",
    "model.position.additive",
    "model.position.per_layer",
    "model.position.scaling",
    "model.training.optim",
    "data.loader",
    "data.tasks",
    "data.recall",
)
EVALUATION = (
    "model.findings.measure",
    "model.evaluation.perplexity",
    "model.evaluation.windows",
    "model.evaluation.lengths",
    "model.evaluation.retrieval",
)


@lru_cache
def code_version(*modules: str) -> str:
    """Twelve hex digits over the syntax trees of `modules`. Comments, docstrings and layout do not count."""
    digest = hashlib.sha256()
    for name in sorted(modules):
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(f"{name}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]
