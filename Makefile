# Every target sets up what it needs in .venv; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin

# Without bytecode every worker of pytest, and every process that a test starts, would compile the
# package and the tests again: half the time of collecting them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: tools demo notebooks test test-long test-slow test-times test-mutants test-versions nightly bench bench-table accelerators docs lint package clean

# Most of the time of tests is compilation. With XLA_FLAGS= they compile as users do.
# Level 0 would fuse no product into a sum, which tests are to see. One thread compiles a program:
# to divide it takes a tenth of the time. The older emitters compile in two thirds of the time, but
# for minutes what is made of a constant in many steps; jaxlib 0.11.1 and later have none, and end at
# a flag that they do not know.
OLDER_FLAGS = --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
KNOWN_FLAGS = $(shell $(BIN)/python -c 'from jaxlib.version import __version_info__ as version; \
	print("$(OLDER_FLAGS)" * (version < (0, 11, 1)))' 2>/dev/null)
QUICKLY = --xla_backend_optimization_level=1 $(KNOWN_FLAGS)

# A second run finds its programs compiled.
demo: export JAX_COMPILATION_CACHE_DIR ?= build/xla
demo: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
demo: .venv/demo
	$(BIN)/python demo/demo.py

# SIZE=small executes them in seconds, as CI does, and writes nothing.
notebooks: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/xla
notebooks: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
notebooks: export DPJAX_NOTEBOOKS = $(SIZE)
ifeq ($(SIZE),small)
notebooks: export XLA_FLAGS ?= $(QUICKLY)
endif
notebooks: .venv/notebooks
	$(BIN)/python notebooks/run.py $(NOTEBOOKS)

# LONG=1 also runs the long tests, as CI does: of those that kill no mutant one half, by the day of the
# commit. In one session, because workers take a minute to find the tests.
test: export XLA_FLAGS ?= $(QUICKLY)
test: export DPJAX_DAY ?= $(if $(LONG),$(shell git log -1 --date=format:%e --format=%cd 2>/dev/null))
test: .venv/test
	$(BIN)/python -m pytest $(if $(LONG),-m "long or not slow") -n auto --dist worksteal

test-slow: export XLA_FLAGS ?= $(QUICKLY)
test-slow: .venv/test .venv/frameworks
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal --ignore=tests/mutation $(TESTS)

# The slow tests that fit into CI: those that are not slow by much, every mechanism, every example.
test-long: export XLA_FLAGS ?= $(QUICKLY)
test-long: .venv/test
	$(BIN)/python -m pytest -m long -n auto --dist worksteal

# Which of the fast tests take long, with nothing compiled before; they become slow ones.
test-times: export XLA_FLAGS ?= $(QUICKLY)
test-times: .venv/test
	rm -rf build/cpu_times.jsonl .pytest_cache/xla
	: > tests/long_tests.txt
	: > tests/longest_tests.txt
	$(BIN)/python -m pytest -p cpu_time -n auto --dist worksteal
	$(BIN)/python tests/cpu_time.py

# Each mutant runs the tests that must fail on it. CHANGED=main runs the mutants of files that differ
# from main, and MUTANTS=40 runs so many, drawn with a seed. Both together run so many, half of them
# of files that differ.
test-mutants: export XLA_FLAGS ?= $(QUICKLY)
test-mutants: export DPJAX_CHANGED = $(CHANGED)
test-mutants: export DPJAX_MUTANTS = $(MUTANTS)
test-mutants: .venv/test
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal tests/mutation

# The fast tests, or TESTS=tests/core, under the oldest and the newest Python and JAX, each in an
# environment of its own.
test-versions:
	$(PYTHON) tests/versions.py $(TESTS)

# Ten minutes: random programs are proved and attacked, 2,000 in float32 and in float64. The seed is
# the day, such as SEED=20261123, which also repeats what failed. cron: 0 2 * * * make -C PATH nightly
SEED ?= $(shell date +%Y%m%d)
nightly: export XLA_FLAGS ?= $(QUICKLY)
nightly: export DPJAX_SEED = $(SEED)
nightly: export DPJAX_PROGRAMS ?= 2000
nightly: .venv/test .venv/frameworks
	@echo "SEED=$(SEED)"
	$(BIN)/python -m pytest -m slow -n 2 tests/proving/test_random_programs.py tests/proving/test_tight_thresholds.py tests/proving/test_programs_of_others.py tests/proving/test_add_remove.py tests/proving/test_missing.py

bench: .venv/bench
	$(BIN)/python bench/run.py $(JOBS)

bench-table:
	$(PYTHON) bench/table.py

# Compiles for GPUs and TPUs that need not be there. An environment of its own: in .venv every
# program would load the plugins. CHECK=--all compiles slow programs too, CHECK="--all --write"
# also writes docs/accelerators.md.
accelerators: export JAX_PLATFORMS := cpu
accelerators: export TF_CPP_MIN_LOG_LEVEL := 3
accelerators: export PYTHONPATH := .:tests
accelerators: .venv/accelerators
	.venv/for-accelerators/bin/python -m accelerators.check $(CHECK)

.venv/accelerators: pyproject.toml
	test -x .venv/for-accelerators/bin/python || $(PYTHON) -m venv .venv/for-accelerators
	.venv/for-accelerators/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[accelerators]'
	touch $@

# Of what is in the repository alone: no network, and every warning is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/docs
	$(BIN)/mkdocs build --quiet

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# What would be published, installed and used where nothing else is.
package: .venv/package
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python -m twine check --strict build/dist/*
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check build/dist/*.whl
	build/empty/bin/python tests/installed_example.py

# What CI needs, installed at once instead of target by target. Python compiles modules when it
# imports them, and most of what is installed is never imported.
tools:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[demo,docs,lint,notebooks,test]'
	cd .venv && touch demo docs lint notebooks test

clean:
	rm -rf .venv build

.venv/demo .venv/notebooks .venv/test .venv/docs .venv/frameworks .venv/lint .venv/bench .venv/package: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(notdir $@)]'
	touch $@
