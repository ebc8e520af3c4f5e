# make run     install what training needs, train on built-in data, print scores, draw plots (QUICK=1: in seconds, for CI)
# make test    install the development tools, run all tests
# make check   lint, types and the quick tests, in about a minute
# make lint    ruff (lint, format) and mypy; make format applies ruff
# make bench   measure speed and memory: results/bench and docs/performance.md
# make audit   bandit on the code, pip-audit on constraints.txt: docs/security.md
# make docs    build the documentation as a website, in site/
# make dist    build sdist and wheel, in dist/; make smoke tries the wheel in an empty environment
# make fuzz    damaged files for every reader, two minutes each: results/fuzz.json

PYTHON ?= python3.11
# Other versions of Python get an environment of their own, and 3.10 its own pins: make test PYTHON=python3.12
VENV := .venv$(if $(filter-out python3.11,$(PYTHON)),-$(notdir $(PYTHON)))
OLD := import sys; print("-3.10" if sys.version_info < (3, 11) else "")
CONSTRAINTS := constraints$(shell $(PYTHON) -c '$(OLD)' 2>/dev/null).txt
BIN := $(VENV)/bin
QUICK ?=
QUICK_OPTIONS := $(if $(QUICK),--classes 60 --epochs 8)
# One process per core, each with one thread: threads that share a core wait for each other. Compiled modules are kept:
# the tests start many processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: run test check lint format bench audit fuzz docs dist smoke setup clean

run: $(VENV)/run-installed
	$(BIN)/proxygml train glyphs $(QUICK_OPTIONS)

test: setup
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for part in loss optimizer evaluation training; do $(BIN)/python -m benchmarks.$$part --quick || exit 1; done
	$(BIN)/python -m benchmarks.report

# pip-audit queries a vulnerability service. Both tools stay out of the environment they audit.
audit: .venv-audit/installed
	.venv-audit/bin/bandit --quiet --recursive proxygml --configfile pyproject.toml
	.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

.venv-audit/installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check bandit==1.9.4 pip-audit==2.10.1
	touch $@

# Warnings are errors, except the theme's warning about future versions of MkDocs.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# Takes minutes, and a network or a local folder of wheels.
smoke: dist
	$(BIN)/python -m tests.smoke dist

fuzz: setup
	$(BIN)/python -m fuzz --seconds 120

setup: $(VENV)/installed

# Each stamp file records an installation; it is repeated only when the requirements change.
define install
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11, or choose 3.10 to 3.13 with make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV), which takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[$(1)]'
endef

$(VENV)/run-installed: pyproject.toml $(CONSTRAINTS)
	$(call install,browse)
	touch $@

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(call install,dev)
	touch $(VENV)/run-installed $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
