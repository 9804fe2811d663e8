# Every target sets up what it needs, so `make test` works in a fresh checkout.

PYTHON ?= python3
# TORCH: release of torch to use instead of the one in requirements.txt, in a separate environment.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
override VENV := $(patsubst %/,%,$(VENV))
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# HERE: any value uses $(PYTHON) with the packages that it has, and installs nothing. Meant for
# machines with their own torch build (ROCm, XPU, another CUDA), or without network access.
HERE ?=
ifneq ($(HERE),)
PY := $(PYTHON)
INSTALLED := has-packages
endif
CLIENTS := .venv-clients
override CLIENTS := $(patsubst %/,%,$(CLIENTS))
ifneq ($(words $(VENV))$(words $(CLIENTS)),11)
$(error VENV and CLIENTS must each be one word)
endif
CLIENTS_INSTALLED := $(CLIENTS)/.installed

# NPROC: number of ranks for `make train`; by default, one per accelerator, or up to four on the CPU.
NPROC ?=
# ARGS: extra arguments for `make train` (examples/compare.py), `make test` (pytest), `make bench`, and
# `make gpu` (scripts/gpu_report.py).
ARGS ?=

# SLOW: any value makes `make test` also run the slowest tests, as continuous integration does.
SLOW ?=

# BENCHMARKS: scripts that `make bench` runs, each with ARGS.
BENCHMARKS ?= $(addprefix benchmarks/,step.py distributed_step.py orthogonalize.py accuracy.py offload.py)

# RESULTS: any value makes each script of `make bench` also write its tables to benchmarks/results.
RESULTS ?=

.DEFAULT_GOAL := help
.PHONY: help has-packages build train test test-clients lint format bench gpu clean

help:
	@echo "make build   build every Hub variant into build/"
	@echo "make train   train a small model with Muon and AdamW (NPROC=ranks, ARGS=options)"
	@echo "make test    lint, then run the tests (SLOW=1: also the slowest; ARGS=\"-m kernels_ci\": only the quick ones;"
	@echo "             TORCH=2.15.0: with that release of torch, without lint)"
	@echo "make test-clients   train with transformers, accelerate, Lightning, torchtitan (installs them)"
	@echo "make lint    run ruff and mypy"
	@echo "make format  fix and format the code with ruff"
	@echo "make bench   time steps, and measure the speed and accuracy of orthogonalization (BENCHMARKS=script,"
	@echo "             ARGS=options; RESULTS=1: also write benchmarks/results/<script>.md)"
	@echo "make gpu     check on GPUs, in ten minutes, what CPUs can't show; write runs/gpu/report.md (HERE=1: with the"
	@echo "             installed Python, torch, and packages; ARGS=--full, --fake, \"--seconds 420\")"
	@echo "make clean   remove outputs and caches, but not the environment"

CHECK_PYTHON := $(PYTHON) -c 'import sys; \
	sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is required: make PYTHON=...")'

HAS_PACKAGES := $(PYTHON) -c 'import importlib.util, sys; \
	names = "torch numpy kernels huggingface_hub rich matplotlib pytest xdist".split(); \
	missing = [name for name in names if importlib.util.find_spec(name) is None]; \
	sys.exit(f"{sys.executable} lacks {missing}: see requirements.txt" if missing else 0)'

has-packages:
	@$(CHECK_PYTHON)
	@$(HAS_PACKAGES)

# Creates an environment. It replaces an environment that make created earlier, but no other folder.
# The marker that tells them apart is written first and stays, so an interrupted run can be repeated.
define ENVIRONMENT
	@$(CHECK_PYTHON)
	@if [ -L "$(1)" ] || [ -n "$$(ls -A "$(1)" 2>/dev/null)" ] && \
		[ ! -e "$(1)/.made-by-make" ] && [ ! -e "$(1)/.installed" ]; then \
		echo "$(1) is not an environment that make created: remove it, or choose another folder" >&2; exit 1; fi
	mkdir -p "$(1)"
	@touch "$(1)/.made-by-make"
	find "$(1)" -mindepth 1 ! -name .made-by-make -delete
	$(PYTHON) -m venv "$(1)"
endef

# Starting from an empty environment repairs an interrupted install and drops packages that are no
# longer required. The stamp is written last, so an incomplete environment never passes for a complete
# one. GPU builds of torch come with a matching Triton. CPU builds don't, so requirements-triton.txt
# installs one that interprets and compiles the kernels.
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

# Releases of torch declare different types, so lint runs only with the one in requirements.txt.
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
