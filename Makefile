# `make demo` and `make test` need nothing but Python >= 3.11 and network access to a package index.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A worker runs files in their order, so that what a file prepares is not prepared in both. Of the long
# tests each commit runs one in eight, others than the commit before; without the option all run.
PYTEST_ARGS ?= -n 2 --dist worksteal --long-tests 8
ANYWHERE_ARGS ?=
KIT_ARGS ?=
KERNELS := $(wildcard providers/native/sources/*)

.PHONY: help demo test anywhere check lint types docs format wheel gpu-kit clean

help:
	@echo "make demo    take the embedded model from checkpoint to text, in seconds"
	@echo "make test    run the tests"
	@echo "make anywhere  run some tests under twelve conditions of other machines"
	@echo "make check   lint, types, docs and the tests under a second each: while you work"
	@echo "make docs    build the documentation into site/, links checked"
	@echo "make lint    check style        make format  apply it"
	@echo "make types   check types        make wheel   build sdist and wheel into dist/"
	@echo "make gpu-kit  wheels in parts for measurements on a machine with a GPU (tools/gpu/kit.py)"
	@echo "make clean   remove what was built, and the virtual environment"

demo: $(VENV)/.demo-ready
	@$(BIN)/carryall demo

test: $(VENV)/.test-ready
	$(BIN)/python -m pytest $(PYTEST_ARGS)

anywhere: $(VENV)/.test-ready
	$(BIN)/python tools/test_anywhere.py $(ANYWHERE_ARGS)

check: lint types docs
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow and not long"

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture

types: $(VENV)/.test-ready
	$(BIN)/mypy

format: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.test-ready
	$(BIN)/python -m build

gpu-kit: $(VENV)/.demo-ready
	$(BIN)/python tools/gpu/make_kit.py $(KIT_ARGS)

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache

# The stamps are renewed when the dependencies or the sources of the CPU kernels change.
$(VENV)/.demo-ready: pyproject.toml $(KERNELS) | $(BIN)/pip
	@echo "Installing carryall and what it needs into $(VENV) (a minute or two, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cpu,images]"
	@touch $@

$(VENV)/.test-ready: pyproject.toml $(KERNELS) | $(BIN)/pip
	@echo "Installing carryall and its test tools into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

$(VENV)/.docs-ready: pyproject.toml | $(BIN)/pip
	@echo "Installing what builds the documentation into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: carryall needs Python >= 3.11, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "       Name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
