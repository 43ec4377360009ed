# Everything a developer or CI does. Each target that needs the environment sets it up first.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The peers that the benchmark compares with live apart: one of them brings torchvision, which breaks
# the trainers of the main environment.
PEERS_VENV ?= .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
BENCH_ARGS ?=

# One thread a worker: two workers with two threads each would fight over two cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz support bench bench-guard lint typecheck format build clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install everything, pinned

# The build backend comes from the constraints too, hence no isolated build environment.
# The stamp is written last, so an interrupted set-up is taken up again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable ".[bench,test,trainers,dev]"
	@touch $@

demo: $(STAMP) ## train digits with every method; table, plots and HTML report in about 2 minutes
	$(ONE_THREAD) $(BIN)/fop-bench demo

test: $(STAMP) ## run the tests on three workers, some of which wait (PYTEST_ARGS="-k name" narrows them)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 3 $(PYTEST_ARGS)

fuzz: $(STAMP) ## property tests with thousands of new random cases (minutes)
	FOP_FUZZ=1 $(ONE_THREAD) $(BIN)/python -m pytest -n 2 tests/test_fuzz.py tests/test_projection.py

support: $(STAMP) ## write docs/support.md and docs/options.md from the registries and the tests
	$(BIN)/python -m tests.support
	$(BIN)/python -m tests.options

$(PEERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt hatchling editables
	$(PEERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable ".[bench,peers]"
	@touch $@

bench: $(PEERS_STAMP) ## cost of a step against peers, for docs/performance.md, in 50 minutes (BENCH_ARGS=--quick: 3)
	$(PEERS_VENV)/bin/fop-bench steps run $(BENCH_ARGS)

bench-guard: $(PEERS_STAMP) ## fail if a step costs much more, against SGD, than recorded (2 minutes)
	$(PEERS_VENV)/bin/fop-bench steps guard

lint: $(STAMP) ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP) ## mypy, strict
	$(BIN)/mypy --strict

format: $(STAMP) ## ruff: fix and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(STAMP) ## build the sdist and the wheel into dist/
	$(BIN)/python -m hatchling build

clean: ## remove caches and builds (keeps .venv and runs/)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .venv-peers
	rm -rf $(VENV) $(PEERS_VENV)
