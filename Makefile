# Each target sets up a virtual environment by itself; it needs a python3 with venv.
#   make fedtp                the main experiment, ARGS="--rounds 50" for its flags
#   make test                 every test but the slow ones; PYTEST="-m slow" for those
#   make lint                 ruff and mypy
# PYTHON picks the interpreter, EXTRAS=cuda13 (or tpu) what jax runs on.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
ARGS ?=
PYTEST ?=

comma := ,
extras := dev$(if $(EXTRAS),$(comma)$(EXTRAS))
installed := $(VENV)/installed-$(notdir $(PYTHON))-$(subst $(comma),-,$(extras))
python := $(VENV)/bin/python

.PHONY: setup fedtp test smoke lint format clean

setup: $(installed)

$(installed): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv --clear $(VENV)
	$(python) -m pip install --quiet --editable '.[$(extras)]'
	touch $@

fedtp: setup
	$(python) -m experiments.fedtp $(ARGS)

test: setup
	$(python) -m pytest -n auto --maxprocesses=8 $(PYTEST)

smoke: setup
	$(python) -m pytest -m smoke $(PYTEST)

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: setup
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

clean:
	rm -rf .venv* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
