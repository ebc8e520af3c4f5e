# make run    set up, train on embedded data, show scores and pictures (QUICK=1: the same in seconds, for CI)
# make test   set up, run the whole test suite
# make lint   ruff: lint and format check; mypy: types
# make bench  speed and memory side by side, in minutes: results/bench and docs/performance.md
# make audit  bandit over the code, pip-audit over what constraints.txt pins: docs/security.md
# make docs   the documentation as a site, in site/
# make dist   sdist and wheel, in dist/; make smoke tries the wheel in an empty environment
# make fuzz   damaged files for every reader, two minutes each: results/fuzz.json

PYTHON ?= python3.11
# Another Python has an environment of its own, and 3.10 pins of its own: make test PYTHON=python3.12
VENV := .venv$(if $(filter-out python3.11,$(PYTHON)),-$(notdir $(PYTHON)))
OLD := import sys; print("-3.10" if sys.version_info < (3, 11) else "")
CONSTRAINTS := constraints$(shell $(PYTHON) -c '$(OLD)' 2>/dev/null).txt
BIN := $(VENV)/bin
QUICK ?=
QUICK_OPTIONS := $(if $(QUICK),--classes 60 --epochs 8)

.PHONY: run test lint format bench audit fuzz docs dist smoke setup clean

run: setup
	$(BIN)/proxygml train glyphs $(QUICK_OPTIONS)

# A file of tests at a time on each core, with one thread: threads that share a core wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

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

# In an environment of its own, which what is audited does not share. pip-audit asks a service for known holes.
audit: .venv-audit/installed
	.venv-audit/bin/bandit --quiet --recursive proxygml --configfile pyproject.toml
	.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

.venv-audit/installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check bandit==1.9.4 pip-audit==2.10.1
	touch $@

# The documentation as a site, in site/. A warning is an error; that of the theme is about what MkDocs may become.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the sdist it is built from, in dist/.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# The wheel in an empty environment: takes minutes and a network, or a folder of wheels that pip knows.
smoke: dist
	$(BIN)/python -m tests.smoke dist

fuzz: setup
	$(BIN)/python -m fuzz --seconds 120

setup: $(VENV)/installed

# Installed again only when what is to be installed has changed.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here: install Python 3.11, or name yours (3.10 to 3.13) with make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
