"""Published findings as runs, measures and claims, and what came of them."""
