PY := .venv/bin/python
BIN := .venv/bin

.PHONY: help setup check format lint types layers deps lock-check test lowest nightly clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## Create .venv with everything that development needs
	uv sync

check: lint types layers deps lock-check ## Everything that must hold before a commit (no tests)

format: ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .

lint: ## ruff, format and rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: ## mypy --strict over packages and tools
	$(BIN)/mypy

layers: ## Imports go down only (import-linter)
	$(BIN)/lint-imports --no-logo .importlinter

deps: ## Every package declares what it imports (deptry)
	$(PY) tools/deps.py

lock-check: ## The committed lock names no address
	git show HEAD:uv.lock | $(PY) tools/lock.py --check -

test: ## The whole test suite
	uv run pytest -n 2 --dist loadfile

lowest: ## The suite against the lowest versions that the packages declare
	tools/lowest.sh

nightly: ## Longer suites; docs/nightly.md has the last figures
	NIGHTLY=1 $(BIN)/pytest tests/system/test_crash.py tests/ckpt/test_kill.py
	NIGHTLY=1 $(BIN)/pytest tests/ckpt/test_reshard_property.py tests/ckpt/test_speed.py --timeout 3600
	NIGHTLY=1 $(BIN)/pytest tests/system/test_quickstart.py tests/system/test_rl_toy.py
	NIGHTLY=1 $(BIN)/pytest tests/data/test_kills.py tests/data/datasets
	NIGHTLY=1 $(BIN)/pytest tests/data/tokenizers/test_materials.py tests/data/preprocessing/test_speed.py
	NIGHTLY=1 $(BIN)/pytest tests/kernels/test_compiles.py tests/kernels/test_interpreter.py
	NIGHTLY=1 $(BIN)/pytest tests/parallel/cost/test_page.py
	$(BIN)/mcore-train parity --matrix full
	MCORE_ORACLE_CONFIGS=260 uv run --group oracle pytest tests/data/datasets/test_gpt_oracle.py
	uv run --group oracle pytest tests/models/megatron/test_oracle.py
	tools/lowest.sh

clean: ## Remove caches and build outputs
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
