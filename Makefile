# On a fresh machine with only Python (3.10 or newer): `make demo` trains, `make test` tests.
#
# PYTHON chooses the interpreter. torch is pinned in this project's own environment; what users may install is a range
# (setup.cfg).
#
# Environments: .venv has torch and numpy, and is all that `make test` needs. Each of the others is for what cannot be
# installed in .venv as well; `make test-all` makes them and runs their tests, too.

PYTHON ?= python3
# Byte code is kept: tests start thousands of interpreters, and compiling hvdgloo costs each of them a tenth of a second.
unexport PYTHONDONTWRITEBYTECODE
# pytest's processes in each target. Where targets run side by side it is 0: then each has one core, and its own process.
WORKERS ?= 2
# And where tests mostly wait, for disks, JVMs, deadlines and what starts: two more use the cores meanwhile.
OVERLAPPING = $(if $(filter 0,$(WORKERS)),2,4)
# How many targets run side by side; as many as there are cores, if this is empty.
JOBS ?=

# Two stages, so that torch is installed once: what the demo needs, then what tests and checks need as well.
VENV ?= .venv
BIN := $(VENV)/bin
READY_DEMO := $(VENV)/.ready-demo
READY := $(VENV)/.ready
TORCH ?= torch==2.13.0
# PyTorch's own index of builds for the CPU. pip's usual one has, for Linux, the build for CUDA: several GB with all it
# needs. Where this one does not answer, pip asks the usual one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TESTS_THREADS ?= tests/unit tests/contract
TESTS_PROCESSES ?= tests/processes tests/gpu
# torch meets every data plane in $(VENV), numpy those that are left in test-pygloo.
PLANES = not (numpy and (gloo or segment or hierarchical or inline or tree))

VENV_GPU ?= .venv-gpu
READY_GPU := $(VENV_GPU)/.ready
# A folder of wheels for test-gpu, for machines without a network.
WHEELS ?=

VENV_TF ?= .venv-tf
READY_TF := $(VENV_TF)/.ready
TENSORFLOW ?= tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2 optax==0.2.8
# flax brings orbax along. The documentation of hvdgloo.jax has programs for these.
WITH_JAX ?= flax==0.12.8 equinox==0.13.8
TF_KERAS ?= tf_keras==2.21.0
TESTS_TF ?= tests/contract tests/architecture tests/unit/test_horovod_surface.py

VENV_MXNET ?= .venv-mxnet
READY_MXNET := $(VENV_MXNET)/.ready
MXNET ?= mxnet==1.9.1
# The last versions that work with MXNet 1.9.1, and with numpy as it needs it.
MXNET_BESIDE ?= numpy==1.23.5 scipy==1.10.1 scikit-learn==1.3.2
# MXNet has wheels that work up to Python 3.11, hvdgloo needs 3.10.
PYTHON_MXNET ?= $(shell $(FIND_PYTHON) 3.11 3.10)
TESTS_MXNET ?= tests/mxnet tests/contract tests/architecture tests/unit/test_horovod_surface.py \
    tests/unit/test_front_end_modules.py

VENV_PYGLOO ?= .venv-pygloo
READY_PYGLOO := $(VENV_PYGLOO)/.ready
PYGLOO ?= pygloo==0.2.1
# pygloo has wheels for CPython 3.8 to 3.10 only.
PYTHON310 ?= $(shell $(FIND_PYTHON) 3.10)
FRONTENDS_PYGLOO ?= numpy,mxnet
TESTS_PYGLOO ?= $(addprefix tests/contract/test_,gloo.py pygloo.py frontend.py frontend_objects.py frontend_reducer.py \
    timeline.py) tests/unit/backends/test_select_gloo.py tests/unit/test_front_end_modules.py
PROCESSES_PYGLOO ?= tests/processes/test_hosts_pygloo.py tests/processes/test_worlds.py

VENV_SPARK ?= .venv-spark
READY_SPARK := $(VENV_SPARK)/.ready
# pandas is not needed by hvdgloo; it is what a transformation_fn is given, and pyspark cannot be imported beside 3 without
# a warning.
SPARK ?= pyspark==4.3.0 pyarrow==26.0.1 fsspec==2026.9.0 "pandas<3" "tensorboard==2.20.*" "setuptools<81"
RAY ?= ray==2.60.0
TESTS_SPARK ?= tests/spark
TESTS_RAY ?= tests/ray
VENV_SPARK35 ?= .venv-spark-3.5
READY_SPARK35 := $(VENV_SPARK35)/.ready
SPARK35 ?= pyspark==3.5.9 pyarrow==17.0.0 fsspec==2026.9.0 "pandas<3"
# pyspark 3.5 is for Python up to 3.11.
PYTHON_SPARK35 ?= $(shell $(FIND_PYTHON) 3.11)
TESTS_SPARK35 ?= tests/spark/test_run.py
# Where there is no Java, tests of Spark are left out, unless HVDGLOO_TEST_REQUIRE_SPARK=1.
HAS_JAVA = test "$$HVDGLOO_TEST_REQUIRE_SPARK" = 1 || command -v java >/dev/null || test -x "$$JAVA_HOME/bin/java"
NO_JAVA = skipped, for lack of Java (17: apt-get install openjdk-17-jre-headless, or JAVA_HOME)

VENV_PACKAGING ?= .venv-packaging
READY_PACKAGING := $(VENV_PACKAGING)/.ready

VENV_PAGE ?= .venv-page
READY_PAGE := $(VENV_PAGE)/.ready
# Where there is no Chromium, tests of the page are left out, unless HVDGLOO_TEST_REQUIRE_CHROMIUM=1.
HAS_CHROMIUM = test "$$HVDGLOO_TEST_REQUIRE_CHROMIUM" = 1 || { command -v chromium && command -v chromedriver; } >/dev/null
NO_CHROMIUM = skipped, for lack of Chromium (apt-get install chromium chromium-driver)

VENV_DOCS ?= .venv-docs
READY_DOCS := $(VENV_DOCS)/.ready
SITE ?= build/site

# One environment for each version of Python: .venv-python-3.12 and so on.
VENV_PYTHON ?= .venv-python
TESTS_PYTHON ?= tests/unit tests/architecture/test_docs.py::test_this_environment_is_in_the_matrix
# pip install, with what is fetched and how far that is: $(INSTALL) <the environment's python> "<what>" <arguments>
INSTALL = @$(PYTHON) tests/support/install.py
FIND_PYTHON = $(PYTHON) tests/support/pythons.py
SIDE_BY_SIDE = WORKERS=0 $(PYTHON) tests/support/side_by_side.py --make "$(MAKE)" $(if $(JOBS),--jobs $(JOBS))
# Versions that are not found are reported. The contracts run on the oldest and the newest (3.14 is not everywhere);
# what can differ on those between them, the unit tests show. On the version of $(VENV), `make test` has run all of this.
PYTHON_TARGETS = $(addprefix test-python-,$(shell $(FIND_PYTHON)))
PYTHONS_WITH_CONTRACTS ?= 3.10 3.13 3.14
OWN_PYTHON = $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")

# What $(VENV) has (torch, numpy, the test tools) is not installed twice: the environment that is the argument
# sees it, behind what is installed there.
PURELIB = $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
SHARE = echo "import site; site.addsitedir('$(call PURELIB,$(abspath $(VENV)))')" > $(call PURELIB,$(1))/shared.pth

.PHONY: demo demo-elastic test test-all test-others test-extended test-tensorflow test-mxnet test-with-mxnet test-pygloo test-with-pygloo \
    test-spark test-with-spark test-ray test-spark-3.5 test-with-spark-3.5 test-packaging test-page test-with-page docs test-docs test-pythons test-gpu test-torch-distributed mutants soak clients check release clean

demo: $(READY_DEMO)
	@mkdir -p build
	$(BIN)/hvdgloo-run -np 2 --page --report build/demo.html examples/torch_digits.py
	@sed "s|^  hvdgloo-run|  $(BIN)/hvdgloo-run|; s|\.venv/bin|$(BIN)|" docs/after-the-demo.txt

demo-elastic: $(READY_DEMO)
	$(BIN)/python examples/demo_elastic.py

# The tests of tests/architecture are in `make check`, and those with the mark "extended" in `make test-extended`. A third
# pytest uses the two cores while ranks wait for each other, and a fourth while programs start and deadlines pass.
test: $(READY)
	$(BIN)/python -m pytest -m "not extended" -n 3 --dist worksteal $(TESTS_THREADS) -k "$(PLANES)"
	$(BIN)/python -m pytest -m "not extended" -n 4 --dist worksteal $(TESTS_PROCESSES)

test-all: check test
	$(MAKE) test-others

# What `make check` and `make test` leave: the extended tests, and all other environments. Each of these is made by its own
# target, so that one is made while the tests of another run. The targets that take longest come first.
test-others: $(READY)
	+$(SIDE_BY_SIDE) test-tensorflow test-spark test-extended test-spark-3.5 test-pygloo test-mxnet \
	    $(filter-out test-python-$(OWN_PYTHON),$(PYTHON_TARGETS)) test-packaging test-page test-docs test-torch-distributed

# More planes, more hosts, more accidents and more input than in `make test` (tests/support/selection.py).
test-extended: $(READY)
	$(BIN)/python -m pytest -m extended -n $(OVERLAPPING) --dist worksteal $(TESTS_THREADS) $(TESTS_PROCESSES) \
	    -k "$(PLANES)"

# TensorFlow has an environment of its own: users have one framework or the other, and so do the other tests. All
# contracts that concern tensors run, on data planes that treat memory differently; on Gloo and on a segment of shared
# memory only a sample, since what happens to a tensor there does not depend on the framework.
test-tensorflow: $(READY_TF)
	HVDGLOO_TEST_FRONTENDS=tensorflow $(VENV_TF)/bin/python -m pytest tests/tensorflow
	HVDGLOO_TEST_FRONTENDS=jax $(VENV_TF)/bin/python -m pytest -m "not extended" -n $(WORKERS) tests/jax tests/contract \
	    -k "jax and not (contract and (gloo or tree or hierarchical or inline or shm))"
	HVDGLOO_TEST_FRONTENDS=jax $(VENV_TF)/bin/python -m pytest -m extended -n $(WORKERS) tests/jax
	HVDGLOO_TEST_FRONTENDS=tensorflow $(VENV_TF)/bin/python -m pytest -n $(WORKERS) $(TESTS_TF) \
	    -k "(tensorflow or keras) and (not (gloo or tree) or test_frontend_objects or test_frontend_adjoints)"

# Spark and Ray have one environment, with every framework, and so they come one after the other: neither finds it half
# made by the other.
test-spark:
	@if $(HAS_JAVA); then $(MAKE) test-with-spark; else echo "test-with-spark: $(NO_JAVA)"; fi
	$(MAKE) test-ray

# Tests that want the same session follow each other (tests/spark/conftest.py), so xdist must not reorder them.
test-with-spark: $(READY_SPARK)
	$(VENV_SPARK)/bin/python -m pytest -o faulthandler_timeout=150 -n $(OVERLAPPING) --dist loadgroup --no-loadscope-reorder \
	    $(TESTS_SPARK)

# Ray may end the whole process, and says why where only --capture=sys lets it be read.
test-ray: $(READY_SPARK)
	$(VENV_SPARK)/bin/python -m pytest --capture=sys $(TESTS_RAY)

# The oldest Spark that hvdgloo is for, with numpy only.
test-spark-3.5:
	@$(if $(PYTHON_SPARK35),if $(HAS_JAVA); then $(MAKE) test-with-spark-3.5; else echo "$@: $(NO_JAVA)"; fi,echo "$@:" \
	    "skipped, for lack of Python 3.11 (on the PATH, of pyenv or uv, or as PYTHON_SPARK35=...)")

test-with-spark-3.5: $(READY_SPARK35)
	$(VENV_SPARK35)/bin/python -m pytest $(TESTS_SPARK35)

# Without torch, with numpy and MXNet.
test-pygloo:
	$(if $(PYTHON310),$(MAKE) test-with-pygloo PYTHON310="$(PYTHON310)",@echo "$@: skipped, for lack of Python 3.10" \
	    "(on the PATH, of pyenv or uv, or as PYTHON310=...)")

test-with-pygloo: $(READY_PYGLOO)
	HVDGLOO_TEST_FRONTENDS=$(FRONTENDS_PYGLOO) HVDGLOO_TEST_BACKENDS=gloo,hierarchical \
	    $(VENV_PYGLOO)/bin/python -m pytest -n $(WORKERS) $(TESTS_PYGLOO) \
	    -k "(gloo or hierarchical or shm or front_end) and not (mxnet and (hierarchical or shm))"
	$(VENV_PYGLOO)/bin/python -m pytest $(PROCESSES_PYGLOO)

# MXNet needs an old numpy and an old Python, so nothing from the other environments can be used; this one has no torch.
test-mxnet:
	$(if $(PYTHON_MXNET),$(MAKE) test-with-mxnet PYTHON_MXNET="$(PYTHON_MXNET)",@echo "$@: skipped, for lack of" \
	    "Python 3.10 or 3.11 (on the PATH, of pyenv or uv, or as PYTHON_MXNET=...), which MXNet 1.9.1 needs")

test-with-mxnet: $(READY_MXNET)
	HVDGLOO_TEST_FRONTENDS=mxnet $(VENV_MXNET)/bin/python -m pytest -n $(WORKERS) $(TESTS_MXNET) \
	    -k "mxnet and not gloo and not tree"

# numpy's front-end on every version of Python that is here, without torch; so contracts that need Gloo are left out.
test-pythons:
	+$(SIDE_BY_SIDE) $(PYTHON_TARGETS)

test-python-%:
	@if $(FIND_PYTHON) $* >/dev/null 2>&1; then $(MAKE) test-with-python-$*; \
	    else echo "$@: skipped, for lack of CPython $* (on the PATH, of pyenv or uv)"; fi

test-with-python-%: $(VENV_PYTHON)-%/.ready
	HVDGLOO_TEST_FRONTENDS=numpy $(VENV_PYTHON)-$*/bin/python -m pytest -n $(WORKERS) $(TESTS_PYTHON)
	$(if $(filter $*,$(PYTHONS_WITH_CONTRACTS)),HVDGLOO_TEST_FRONTENDS=numpy $(VENV_PYTHON)-$*/bin/python -m pytest \
	    -n $(WORKERS) tests/contract -k "not (gloo or hierarchical)")

# Not to be removed as an intermediate file of a pattern rule.
.PRECIOUS: $(VENV_PYTHON)-%/.ready

# What users install: distributions are built, installed and run.
test-packaging: $(READY_PACKAGING)
	$(VENV_PACKAGING)/bin/python -m pytest tests/packaging

# The page of a job in a real browser, which Selenium drives.
test-page:
	@if $(HAS_CHROMIUM); then $(MAKE) test-with-page; else echo "test-with-page: $(NO_CHROMIUM)"; fi

test-with-page: $(READY_PAGE)
	$(VENV_PAGE)/bin/python -m pytest tests/page

# The documentation as a site: pages to be opened from the disk, with a search, that need no network. Any warning, such as
# a link that leads nowhere, is an error.
docs: $(READY_DOCS)
	@$(VENV_DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going docs $(SITE)
	@echo "open $(abspath $(SITE))/index.html"

test-docs: $(READY_DOCS)
	$(VENV_DOCS)/bin/python -m pytest tests/site

# With the torch of PYTHON, on a machine with a GPU. Part of the tests needs two GPUs. At the end there is a report,
# gpu-report.md, to be sent; without a GPU it says so, and fails. A test that hangs fails alone: pytest's thread that
# watches would end them all. The machine's torch may warn of what ours does not.
test-gpu: $(READY_GPU)
	HVDGLOO_TEST_REQUIRE_GPU=1 $(VENV_GPU)/bin/python -m pytest -W default -o timeout=180 -o timeout_method=signal tests/gpu

# torch's own tests of torch.distributed, from its wheel: on the backend hvdgloo, and on gloo under HVDGLOO_AS_GLOO=1. WAYS=gloo
# runs them on torch's own gloo, for comparison.
test-torch-distributed: $(READY)
	$(BIN)/python -m tests.torch_suite --jobs $(OVERLAPPING) $(WAYS)

# Not part of the tests: libraries that use Horovod or torch.distributed, each in an environment of its own
# (docs/compatibility.md). CLIENTS="itwinai open_clip" runs these only.
clients: $(READY)
	$(BIN)/python -m tests.clients $(CLIENTS)

# Not part of the tests: it shows that they catch planted faults (tests/mutants/README.md).
mutants: $(READY)
	$(BIN)/python -m tests.mutants -j 2

# Not part of the tests: a quarter of an hour of random operations, and 256 processes that agree. Any wrong result, growth
# of memory or operation that does not end is a failure.
soak: $(READY)
	$(BIN)/python benchmarks/soak.py --seconds 600
	$(BIN)/python benchmarks/tree.py --processes 256

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

# make release VERSION=0.2.0: a commit, a tag, and distributions that can be uploaded. Nothing is uploaded or pushed.
release: $(READY_PACKAGING)
	$(VENV_PACKAGING)/bin/python packaging/release.py $(VERSION)

clean:
	rm -rf $(VENV) $(VENV_GPU) $(VENV_TF) $(VENV_MXNET) $(VENV_PYGLOO) $(VENV_SPARK) $(VENV_SPARK35) $(VENV_PACKAGING) $(VENV_PAGE) $(VENV_DOCS) $(VENV_PYTHON)-* .venv-clients \
	    build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch is installed first and by its pin, so that no other package's range fetches another build of it. The demo
# imports a third of all modules, and compiles these as it goes; compiling all would take as long as the demo.
$(READY_DEMO): setup.cfg setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(BIN)/python "torch for the CPU (200 MB to fetch, 730 MB on disk)" \
	    --index $(TORCH_INDEX) --no-compile "$(TORCH)"
	$(INSTALL) $(BIN)/python "hvdgloo and what its examples need (65 MB to fetch, 210 MB on disk)" \
	    --no-compile --editable ".[examples]"
	@touch $@

$(READY): $(READY_DEMO)
	$(INSTALL) $(BIN)/python "the tools of tests and checks (40 MB to fetch)" --editable ".[dev]"
	@echo "$(VENV): compiling what was left, which takes about 20 s"
	@$(BIN)/python -m compileall -q -j 2 $(call PURELIB,$(VENV)) >/dev/null || true # templates are not Python
	@touch $@

# The environment sees the packages of PYTHON's own environment, which may itself be a virtual one, and the checkout. So
# only what is missing there is installed, from the folder WHEELS if that is given; then no network is needed.
$(READY_GPU): setup.cfg setup.py Makefile
	rm -rf $(VENV_GPU)
	$(PYTHON) -m venv --without-pip $(VENV_GPU)
	@$(PYTHON) -c "import sys; print('$(CURDIR)'); [print(f'import site; site.addsitedir({folder!r})') for folder in sys.path if \
	    folder.endswith('-packages')]" > $(call PURELIB,$(VENV_GPU))/machine.pth
	@$(VENV_GPU)/bin/python -m pip --version >/dev/null 2>&1 || $(VENV_GPU)/bin/python -m ensurepip
	$(INSTALL) $(VENV_GPU)/bin/python "what tests/gpu lacks (up to 20 MB to fetch); torch is the machine's" --extra test-gpu \
	    $(if $(WHEELS),--no-index --find-links "$(WHEELS)") || { echo "Without a network: where there is one, run" \
	    "'pip download --dest wheels .[test-gpu]' for this version of Python, bring the folder here and say WHEELS=wheels"; exit 1; }
	touch $@

# tf_keras comes without its dependencies, or it would bring the large build of TensorFlow.
$(READY_TF): $(READY)
	rm -rf $(VENV_TF)
	$(PYTHON) -m venv $(VENV_TF)
	$(call SHARE,$(VENV_TF))
	$(INSTALL) $(VENV_TF)/bin/python "TensorFlow, Keras and JAX (430 MB to fetch)" \
	    $(TENSORFLOW) $(WITH_JAX)
	$(INSTALL) $(VENV_TF)/bin/python "tf_keras (2 MB to fetch)" --no-deps $(TF_KERAS)
	$(INSTALL) $(VENV_TF)/bin/python "hvdgloo" --editable . --no-deps
	touch $@

$(READY_SPARK): $(READY)
	rm -rf $(VENV_SPARK)
	$(PYTHON) -m venv $(VENV_SPARK)
	$(call SHARE,$(VENV_SPARK))
	$(INSTALL) $(VENV_SPARK)/bin/python "Spark, Ray, TensorFlow, Keras and JAX (1200 MB to fetch)" \
	    $(SPARK) $(RAY) $(TENSORFLOW)
	$(INSTALL) $(VENV_SPARK)/bin/python "tf_keras (2 MB to fetch)" --no-deps $(TF_KERAS)
	$(INSTALL) $(VENV_SPARK)/bin/python "hvdgloo" --editable . --no-deps
	@if $(HAS_JAVA); then $(VENV_SPARK)/bin/python -m tests.support.spark_archive || echo "Tests do without it."; fi
	touch $@

$(READY_SPARK35): setup.cfg setup.py Makefile
	rm -rf $(VENV_SPARK35)
	$(PYTHON_SPARK35) -m venv $(VENV_SPARK35)
	$(INSTALL) $(VENV_SPARK35)/bin/python "Spark 3.5 and the tools of tests, without torch (430 MB to fetch)" \
	    --editable ".[test-unit]" $(SPARK35)
	touch $@

$(READY_PYGLOO): setup.cfg setup.py Makefile
	rm -rf $(VENV_PYGLOO)
	$(PYTHON310) -m venv $(VENV_PYGLOO)
	$(INSTALL) $(VENV_PYGLOO)/bin/python "pygloo and the tools of tests, without torch (80 MB to fetch)" \
	    --editable ".[pygloo,test]" $(PYGLOO) $(MXNET_BESIDE)
	$(INSTALL) $(VENV_PYGLOO)/bin/python "MXNet (47 MB to fetch)" --no-deps $(MXNET)
	touch $@

# MXNet comes without its dependencies: of these only numpy and requests are used, and graphviz would be ancient.
$(READY_MXNET): setup.cfg setup.py Makefile
	rm -rf $(VENV_MXNET)
	$(PYTHON_MXNET) -m venv $(VENV_MXNET)
	$(INSTALL) $(VENV_MXNET)/bin/python "the tools of tests, without torch (80 MB to fetch)" \
	    --editable ".[test]" $(MXNET_BESIDE)
	$(INSTALL) $(VENV_MXNET)/bin/python "MXNet (47 MB to fetch)" --no-deps $(MXNET)
	touch $@

$(READY_PACKAGING): $(READY)
	rm -rf $(VENV_PACKAGING)
	$(PYTHON) -m venv $(VENV_PACKAGING)
	$(call SHARE,$(VENV_PACKAGING))
	$(INSTALL) $(VENV_PACKAGING)/bin/python "the tools that build distributions (10 MB to fetch)" \
	    --editable ".[packaging]"
	touch $@

$(READY_PAGE): $(READY)
	rm -rf $(VENV_PAGE)
	$(PYTHON) -m venv $(VENV_PAGE)
	$(call SHARE,$(VENV_PAGE))
	$(INSTALL) $(VENV_PAGE)/bin/python "Selenium (11 MB to fetch)" --editable ".[test-page]"
	touch $@

$(READY_DOCS): setup.cfg setup.py Makefile
	rm -rf $(VENV_DOCS)
	$(PYTHON) -m venv $(VENV_DOCS)
	$(INSTALL) $(VENV_DOCS)/bin/python "Sphinx, and the tools of tests, without torch (45 MB to fetch)" \
	    --editable ".[docs,test-unit]"
	touch $@

$(VENV_PYTHON)-%/.ready: setup.cfg setup.py Makefile
	rm -rf $(VENV_PYTHON)-$*
	"$$($(FIND_PYTHON) $*)" -m venv $(VENV_PYTHON)-$*
	$(INSTALL) $(VENV_PYTHON)-$*/bin/python "the tools of tests, without torch (30 MB to fetch)" \
	    --editable ".[test-unit]"
	touch $@
