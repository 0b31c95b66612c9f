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
VENV_GPU ?= .venv-gpu
READY_GPU := $(VENV_GPU)/.ready

.PHONY: demo test test-gpu check clean

demo: $(READY)
	$(BIN)/hvdgloo-run -np 2 examples/torch_digits.py

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

# With the torch that is installed on a machine with a GPU, which this environment sees.
test-gpu: $(READY_GPU)
	HVDGLOO_TEST_REQUIRE_GPU=1 $(VENV_GPU)/bin/python -m pytest tests/gpu

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

clean:
	rm -rf $(VENV) $(VENV_GPU) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch is installed first and by its pin, so that no other package's range fetches another build of it.
$(READY): setup.cfg setup.py Makefile
	@echo "Making $(VENV) with all that is needed; torch alone is 200 MB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(READY_GPU): setup.cfg setup.py Makefile
	$(PYTHON) -m venv --system-site-packages $(VENV_GPU)
	$(VENV_GPU)/bin/python -m pip install --quiet --editable ".[test]"
	touch $@
