# make demo        install, fetch the model once, and run configs/quickstart.yaml
# make test        install with the test tools; lint, types and fast tests, on all cores (what CI runs)
# make test-slow   the tests that need the model or more than a few seconds (marker `slow`), among them every
#                  combination that Triton's attention kernels are compiled for, of which make test takes two
# make faults      plant known faults, one at a time, and show which tests notice (minutes)
# make clean       remove what make and the tools made here; the fetched model stays in its cache
#
# PYTHON=python3.12 chooses the interpreter. pip's own settings (index, cache, certificates) apply, so a CPU or CUDA
# build of torch comes from wherever pip is told to look.

ifeq ($(wildcard setup.py),)
$(error run make in the repository, or as make -C REPOSITORY)
endif

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-slow faults clean

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11,$(shell $(python) -c '$(SUPPORTED)' 2>/dev/null && echo $(python))))

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
# A stamp is the last thing that its recipe writes, so a failed or interrupted install leaves none.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
# Not compiled: of torch alone that takes three quarters of the time, and Python compiles what it imports once, whatever
# the environment says: else each process that a test or a command starts would do it again, in seconds.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(VENV_PYTHON) -m pip install --disable-pip-version-check --no-input --no-compile --quiet -c constraints.txt
INPUTS := setup.py pyproject.toml constraints.txt hispec/version.py

demo: $(INSTALLED)
	$(VENV)/bin/hispec fetch smollm2
	$(VENV)/bin/hispec run configs/quickstart.yaml

test: $(INSTALLED_TEST)
	PYTHON="$(CURDIR)/$(VENV_PYTHON)" scripts/check.sh

test-slow: $(INSTALLED_TEST)
	$(VENV)/bin/hispec fetch smollm2
	PYTHON="$(CURDIR)/$(VENV_PYTHON)" scripts/check.sh -m slow

faults: $(INSTALLED_TEST)
	$(VENV_PYTHON) scripts/planted_faults.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' || { echo 'HiSpec needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12' >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and by itself: it is by far the largest, and with its pinned build in place nothing later can pull another.
$(INSTALLED): $(CREATED) $(INPUTS)
	rm -f $@
	@echo 'installing torch (the large part), then HiSpec and the rest'
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(INSTALLED_TEST): $(INSTALLED)
	rm -f $@
# Kernels are compiled on the core that pip does not need; scripts/check.sh would do it, and does what is left of it.
	$(VENV_PYTHON) -c 'import ee_models.fused_kernel' & $(INSTALL) -e '.[test]' && { wait || true; }
	touch $@
