# On a fresh machine with only Python (3.10 or newer): `make demo` trains, `make test` tests.
#
# PYTHON chooses the interpreter. torch is pinned in this project's own environment; what users may install is a range
# (setup.cfg).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TESTS ?= tests

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/hvdgloo-run -np 2 examples/torch_digits.py

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch is installed first and by its pin, so that no other package's range fetches another build of it.
$(READY): setup.cfg setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@
