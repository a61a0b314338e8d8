# make train and make test set up .venv on first use and need nothing else
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test test-slow check reproduce

setup: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --progress-bar on -e ".[test]"
	touch $@

train: setup
	$(BIN)/python train.py

reproduce: setup
	$(BIN)/python scripts/reproduce.py finding=all scale=cpu

test: setup check
	$(BIN)/python -m pytest --numprocesses auto

test-slow: setup
	$(BIN)/python -m pytest -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
