# On a fresh machine with only Python (3.10 or newer): `make demo` trains, `make test` tests.
#
# PYTHON chooses the interpreter. torch is pinned in this project's own environment; what users may install is a range
# (setup.cfg).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TESTS_THREADS ?= tests/unit tests/contract tests/architecture
TESTS_PROCESSES ?= tests/processes tests/gpu

BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV_GPU ?= .venv-gpu
READY_GPU := $(VENV_GPU)/.ready
VENV_TF ?= .venv-tf
READY_TF := $(VENV_TF)/.ready
TENSORFLOW ?= tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2
TF_KERAS ?= tf_keras==2.21.0
VENV_PYGLOO ?= .venv-pygloo
READY_PYGLOO := $(VENV_PYGLOO)/.ready
PYGLOO ?= pygloo==0.2.1
FRONTENDS_PYGLOO ?= numpy,mxnet
TESTS_PYGLOO ?= $(addprefix tests/contract/test_,gloo.py pygloo.py frontend.py frontend_objects.py frontend_reducer.py \
    timeline.py) tests/unit/test_gloo_provider.py tests/unit/test_front_end_modules.py
PROCESSES_PYGLOO ?= tests/processes/test_hosts_pygloo.py tests/processes/test_worlds.py
# The first Python 3.10 that runs (a shim of pyenv's may not); empty if there is none.
PYTHON310 ?= $(shell for python in python3.10 "$$(pyenv prefix 3.10 2>/dev/null)/bin/python3.10" \
    $$HOME/.pyenv/versions/3.10*/bin/python3.10 "$$(uv python find 3.10 2>/dev/null)"; do \
    "$$python" -c "import ensurepip" 2>/dev/null && command -v "$$python" && break; done)
TESTS_TF ?= tests/contract tests/architecture tests/unit/test_horovod_surface.py

VENV_MXNET ?= .venv-mxnet
READY_MXNET := $(VENV_MXNET)/.ready
MXNET ?= mxnet==1.9.1
# The last versions that work with MXNet 1.9.1, and with numpy as it needs it.
MXNET_BESIDE ?= numpy==1.23.5 scipy==1.10.1 scikit-learn==1.3.2
# MXNet has wheels that work up to Python 3.11, hvdgloo needs 3.10: the first of these that can make an environment.
PYTHONS_MXNET ?= $(PYTHON) python3.11 python3.10 $(wildcard $(HOME)/.pyenv/versions/3.11.*/bin/python) \
    $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) \
    $(shell uv python find 3.11 2>/dev/null) $(shell uv python find 3.10 2>/dev/null)
PYTHON_MXNET = $(firstword $(foreach python,$(PYTHONS_MXNET),$(shell \
    $(python) -c "import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 12))" 2>/dev/null \
    && echo $(python))))
TESTS_MXNET ?= tests/mxnet tests/contract tests/architecture tests/unit/test_horovod_surface.py \
    tests/unit/test_front_end_modules.py

.PHONY: demo test test-main test-tensorflow test-mxnet test-with-mxnet test-pygloo test-gpu check clean

demo: $(READY)
	$(BIN)/hvdgloo-run -np 2 examples/torch_digits.py

test: test-main test-tensorflow test-mxnet test-pygloo

# Where ranks are threads of one process, a second pytest has the second core to itself. Tests of several processes wait
# half of their time, for programs to start and for deadlines to pass; a third pytest has the cores meanwhile. torch meets
# every data plane here, numpy those that are left in test-pygloo.
test-main: $(READY)
	$(BIN)/python -m pytest -n 2 $(TESTS_THREADS) -k "not (numpy and (gloo or segment or hierarchical or inline))"
	$(BIN)/python -m pytest -n 3 --dist worksteal $(TESTS_PROCESSES)

# TensorFlow has an environment of its own: users have one framework or the other, and so has the rest of the tests. Of
# the contracts all run that concern tensors, on data planes that treat memory differently; on Gloo and on a segment of
# shared memory a sample, since what becomes of a tensor there does not depend on the framework.
test-tensorflow: $(READY_TF)
	HVDGLOO_TEST_FRONTENDS=tensorflow $(VENV_TF)/bin/python -m pytest tests/tensorflow
	HVDGLOO_TEST_FRONTENDS=tensorflow $(VENV_TF)/bin/python -m pytest -n 2 $(TESTS_TF) \
	    -k "(tensorflow or keras) and (not (gloo or segment) or test_frontend_objects or test_frontend_adjoints)"

# Without torch, with numpy and MXNet. pygloo has wheels for CPython 3.8 to 3.10 only.
test-pygloo:
ifeq ($(PYTHON310),)
	@echo "test-pygloo: skipped, for lack of Python 3.10 (on the PATH, of pyenv or uv, or as PYTHON310=...)"
else
test-pygloo: $(READY_PYGLOO)
	HVDGLOO_TEST_FRONTENDS=$(FRONTENDS_PYGLOO) HVDGLOO_TEST_BACKENDS=gloo,hierarchical \
	    $(VENV_PYGLOO)/bin/python -m pytest -n 2 $(TESTS_PYGLOO) \
	    -k "(gloo or hierarchical or shm or front_end) and not (mxnet and (hierarchical or shm))"
	$(VENV_PYGLOO)/bin/python -m pytest $(PROCESSES_PYGLOO)
endif

# MXNet needs an old numpy and an old Python, so nothing of the other environments is of use; there is no torch in this.
test-mxnet:
	@if [ -z "$(PYTHON_MXNET)" ]; then \
	    echo "test-mxnet is skipped: MXNet 1.9.1 needs Python 3.10 or 3.11, and neither was found;" \
	        "'make test-mxnet PYTHON_MXNET=<its path>' takes one from elsewhere"; \
	else \
	    $(MAKE) test-with-mxnet; \
	fi

test-with-mxnet: $(READY_MXNET)
	HVDGLOO_TEST_FRONTENDS=mxnet $(VENV_MXNET)/bin/python -m pytest -n 2 $(TESTS_MXNET) \
	    -k "mxnet and not gloo and not segment"

# With the torch that is installed on a machine with a GPU, which this environment sees.
test-gpu: $(READY_GPU)
	HVDGLOO_TEST_REQUIRE_GPU=1 $(VENV_GPU)/bin/python -m pytest tests/gpu

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

clean:
	rm -rf $(VENV) $(VENV_GPU) $(VENV_TF) $(VENV_MXNET) $(VENV_PYGLOO) build dist *.egg-info .pytest_cache .mypy_cache \
	    .ruff_cache

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

# What $(VENV) has (torch, numpy, the test tools) is not installed twice: a .pth file makes it visible from here, behind
# what is installed here. tf_keras comes without its dependencies, or it would bring the large build of TensorFlow.
$(READY_TF): $(READY)
	@echo "Making $(VENV_TF); TensorFlow is 270 MB."
	rm -rf $(VENV_TF)
	$(PYTHON) -m venv $(VENV_TF)
	$(VENV_TF)/bin/python -c "import pathlib, sysconfig; \
	    shared = sysconfig.get_path('purelib', vars={'base': '$(abspath $(VENV))'}); \
	    own = pathlib.Path(sysconfig.get_path('purelib')); \
	    (own / 'shared.pth').write_text(f'import site; site.addsitedir({shared!r})\n')"
	$(VENV_TF)/bin/python -m pip install --quiet $(TENSORFLOW)
	$(VENV_TF)/bin/python -m pip install --quiet --no-deps $(TF_KERAS)
	$(VENV_TF)/bin/python -m pip install --quiet --editable . --no-deps
	touch $@

$(READY_PYGLOO): setup.cfg setup.py Makefile
	@echo "Making $(VENV_PYGLOO), without torch."
	rm -rf $(VENV_PYGLOO)
	$(PYTHON310) -m venv $(VENV_PYGLOO)
	$(VENV_PYGLOO)/bin/python -m pip install --quiet --editable ".[pygloo,test]" $(PYGLOO) $(MXNET_BESIDE)
	$(VENV_PYGLOO)/bin/python -m pip install --quiet --no-deps $(MXNET)
	touch $@

# MXNet comes without its dependencies: of these only numpy and requests serve, and graphviz would be an ancient one.
$(READY_MXNET): setup.cfg setup.py Makefile
	@echo "Making $(VENV_MXNET); MXNet and what it needs are 120 MB."
	rm -rf $(VENV_MXNET)
	$(PYTHON_MXNET) -m venv $(VENV_MXNET)
	$(VENV_MXNET)/bin/python -m pip install --quiet --editable ".[test]" $(MXNET_BESIDE)
	$(VENV_MXNET)/bin/python -m pip install --quiet --no-deps $(MXNET)
	touch $@
