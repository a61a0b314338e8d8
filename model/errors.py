"""What can go wrong that is no bug. Imports nothing, for the processes that tokenize start with it."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right: entry points print it as one sentence and exit with code 2."""

    said = False  # by another process of the same training


class RunFailed(RuntimeError):
    """A run that cannot go on through no slip of the keyboard: printed as one sentence, exit code 1."""

    said = False


class Diverged(RunFailed):
    """Its loss, gradients or weights are no numbers any more."""
