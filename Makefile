# make env | demo | test | check | lock      (PYTHON=python3.12 make env: another interpreter)
#
# Needs Python 3.11 or newer, make and a package index: no GPU, no Hugging Face access.
# Every target makes .venv first. .venv is rebuilt when a lock file changes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

# The environment is named by what it was made from: the content of the lock files, and of
# the two packages that live here.
key     = $(shell cat $(1) | cksum | cut -d' ' -f1)
LOCKED := $(VENV)/.locked-$(call key,requirements/*.lock)
READY  := $(VENV)/.ready-$(call key,requirements/*.lock pyproject.toml $(sort $(shell find packaging/sglang_cpu -name '*.py' -o -name '*.toml')))

# Small models on few cores: spinning OpenMP threads cost more than they compute.
export OMP_NUM_THREADS ?= 1

.PHONY: env demo test check lock clean
.DELETE_ON_ERROR:

env: $(READY)

$(LOCKED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvhub needs Python 3.11 or newer: " + sys.executable + " is " + sys.version.split()[0] + " (try: make PYTHON=python3.12 env)")'
	@echo "making $(VENV) (about two minutes and 3 GB; 6 GB where torch is a CUDA build)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -r requirements/torch.lock
	$(PIP) install --no-deps -r requirements/dev.lock
	$(PIP) install --no-deps -r requirements/sglang.lock
	@touch $@

$(READY): $(LOCKED)
	$(PIP) install --no-deps --no-build-isolation --force-reinstall ./packaging/sglang_cpu
	$(PIP) install --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(READY)
	$(BIN)/python -m demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: $(READY)
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) build dist demo-report.json
