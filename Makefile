# Every target sets up what it needs: `make test` in a fresh checkout is enough.

PYTHON ?= python3
# TORCH: a release to use in place of the one in requirements.txt, in an environment of its own.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
override VENV := $(patsubst %/,%,$(VENV))
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# HERE: anything takes $(PYTHON) with the packages that it has, and installs nothing: for machines
# with a torch of their own (ROCm, XPU, another CUDA), or without a network.
HERE ?=
ifneq ($(HERE),)
PY := $(PYTHON)
INSTALLED := has-packages
endif
CLIENTS := .venv-clients
override CLIENTS := $(patsubst %/,%,$(CLIENTS))
ifneq ($(words $(VENV))$(words $(CLIENTS)),11)
$(error VENV and CLIENTS are one word each)
endif
CLIENTS_INSTALLED := $(CLIENTS)/.installed

# NPROC: ranks of `make train`. By default one per accelerator, or up to four that share the CPU.
NPROC ?=
# ARGS: extra arguments of `make train` (examples/compare.py), `make test` (pytest), `make bench` and
# `make gpu` (scripts/gpu_report.py).
ARGS ?=

# SLOW: anything makes `make test` run the slowest tests, too, as continuous integration does.
SLOW ?=

# BENCHMARKS: which scripts; ARGS go to each of them.
BENCHMARKS ?= $(addprefix benchmarks/,step.py distributed_step.py orthogonalize.py accuracy.py offload.py)

# RESULTS: anything makes each script of `make bench` write its tables to benchmarks/results, too.
RESULTS ?=

.DEFAULT_GOAL := help
.PHONY: help has-packages build train test test-clients lint format bench gpu clean

help:
	@echo "make build   build every Hub variant into build/"
	@echo "make train   train a small model with Muon and AdamW (NPROC=ranks, ARGS=options)"
	@echo "make test    lint, then run the tests (SLOW=1: the slowest, too; ARGS=\"-m kernels_ci\": the quick ones;"
	@echo "             TORCH=2.15.0: with that torch, without lint)"
	@echo "make test-clients   train with transformers, accelerate, Lightning, torchtitan (installs them)"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make bench   time steps and orthogonalization, and show its accuracy (BENCHMARKS=script, ARGS=options;"
	@echo "             RESULTS=1: write benchmarks/results/<script>.md, too)"
	@echo "make gpu     prove on GPUs what CPUs cannot, in ten minutes, and write runs/gpu/report.md (HERE=1: with the"
	@echo "             Python, torch and packages that are there; ARGS=--full, --fake, \"--seconds 420\")"
	@echo "make clean   remove outputs and caches (not the environment)"

CHECK_PYTHON := $(PYTHON) -c 'import sys; \
	sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'

HAS_PACKAGES := $(PYTHON) -c 'import importlib.util, sys; \
	names = "torch numpy kernels huggingface_hub rich matplotlib pytest xdist".split(); \
	missing = [name for name in names if importlib.util.find_spec(name) is None]; \
	sys.exit(f"{sys.executable} lacks {missing}: see requirements.txt" if missing else 0)'

has-packages:
	@$(CHECK_PYTHON)
	@$(HAS_PACKAGES)

# Makes an environment, in the place of one that was made here before, of nobody else's folder. The
# mark that tells them apart is there first and stays, so that an interrupted run can be repeated.
define ENVIRONMENT
	@$(CHECK_PYTHON)
	@if [ -L "$(1)" ] || [ -n "$$(ls -A "$(1)" 2>/dev/null)" ] && \
		[ ! -e "$(1)/.made-by-make" ] && [ ! -e "$(1)/.installed" ]; then \
		echo "$(1) is no environment that make has made: remove it, or name another folder" >&2; exit 1; fi
	mkdir -p "$(1)"
	@touch "$(1)/.made-by-make"
	find "$(1)" -mindepth 1 ! -name .made-by-make -delete
	$(PYTHON) -m venv "$(1)"
endef

# Starting from an empty environment repairs an interrupted install and drops what is no longer
# required; the stamp is written last, so that neither passes for a complete one. GPU builds of torch
# bring the Triton that fits them; beside its CPU build this one interprets and compiles the kernels.
$(VENV)/.installed: requirements.txt requirements-triton.txt
	$(call ENVIRONMENT,$(VENV))
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' requirements.txt > $(VENV)/requirements.txt
	$(PY) -m pip install --no-input --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	@$(PY) -c 'import triton' 2>/dev/null || \
	$(PY) -m pip install --no-input --quiet --disable-pip-version-check --no-deps -r requirements-triton.txt
	@touch $@

$(CLIENTS_INSTALLED): requirements-clients.txt requirements-vision.txt requirements-triton.txt
	$(call ENVIRONMENT,$(CLIENTS))
	$(CLIENTS)/bin/python -m pip install --no-input --quiet --disable-pip-version-check -r $<
	@$(CLIENTS)/bin/python -c 'import triton' 2>/dev/null || $(CLIENTS)/bin/python -m pip install \
		--no-input --quiet --disable-pip-version-check --no-deps -r requirements-triton.txt
	$(CLIENTS)/bin/python -m pip install --no-input --quiet --disable-pip-version-check --no-deps \
		--target $(CLIENTS)/vision -r requirements-vision.txt
	@touch $@

build: $(INSTALLED)
	$(PY) scripts/build.py

define COUNT_RANKS
import os, torch
cores = os.cpu_count() or 1
ranks = int("$(NPROC)" or torch.accelerator.device_count() or min(cores, 4))
print(ranks, max(1, cores // ranks))
endef
export COUNT_RANKS

train: build
	@counts=$$($(PY) -c "$$COUNT_RANKS") && set -- $$counts && set -x && \
	LOCAL_KERNELS="org/optimizer=$(CURDIR)" OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$2} \
	$(PY) -m torch.distributed.run --standalone --nproc-per-node=$$1 examples/compare.py $(ARGS)

# Other releases declare other types, so lint is for the one in requirements.txt.
test: $(if $(TORCH)$(HERE),$(INSTALLED),lint)
	$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(if $(SLOW),,-m "not slow") $(ARGS)

test-clients: $(CLIENTS_INSTALLED)
	$(CLIENTS)/bin/python -m pytest tests/clients

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: build
	@for script in $(BENCHMARKS); do \
		results=$(if $(RESULTS),benchmarks/results/$$(basename $$script .py).md); \
		if [ -n "$$results" ]; then rm -f "$$results"; fi; \
		LOCAL_KERNELS="org/optimizer=$(CURDIR)" BENCHMARK_RESULTS="$$results" \
			$(PY) $$script $(ARGS) || exit 1; \
	done

gpu: build
	LOCAL_KERNELS="org/optimizer=$(CURDIR)" $(PY) scripts/gpu_report.py $(ARGS)

clean:
	rm -rf build runs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
