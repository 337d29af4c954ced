# `make` lists the targets. Each makes .venv by itself when it is missing.
#
#   PYTHON=python3.11     the interpreter that .venv is made with, 3.10 to 3.12; without it the first that fits
#   TORCH_INDEX_URL=URL   where torch comes from. On Linux PyPI's torch brings CUDA (gigabytes more, and it works without
#                         a GPU all the same); https://download.pytorch.org/whl/cpu has the CPU build
#   PIP_ARGS=...          further arguments for every `pip install`, e.g. an index or a folder of wheels
#   PYTEST_ARGS=...       further arguments for pytest, e.g. PYTEST_ARGS="-k reward -x"
#   TEST_WORKERS=N        processes that tests run in, 3 by default; 0 runs them in pytest's own
#   BENCH_ARGS=...        options of benchmarks/compare_trl.py, e.g. BENCH_ARGS="--group 8 --prompt-tokens 256"
#   GPU_CHECK_ARGS=...    options of tools/gpu_check.py, e.g. GPU_CHECK_ARGS="--only machine attention"
#   IMAGE_PYTHON=python   the interpreter of `make rehearse`; without it a Python 3.12 that runs, else the nearest
#   REHEARSE_ARGS=...     options of tools/rehearse.py, e.g. REHEARSE_ARGS="--only check-fake"
#   DEMO_STEPS=N          a shorter or longer demo; DEMO_ARGS="key=value ..." are Hydra overrides for it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
PIP_ARGS ?=
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 3
DEMO_ARGS ?=
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
IMAGE_PYTHON ?=
REHEARSE_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
CONSTRAINTS := constraints/cpu-py311.txt
ASYNC := tests/rollout/test_disaggregated.py tests/rollout/test_finished_first.py tests/rollout/test_separate.py \
	tests/generation/test_vllm_updates.py tests/launch/slurm/test_job_generators.py tests/launch/slurm/test_job_separate.py
# One file of tests stays in one process: its fixtures, often a server or a model, are made once.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# In CI, what failed runs again, in new processes. Exit status 1: all others have run.
run_tests = $(PYTEST) $(1) || \
	(code=$$?; [[ -n "$${CI:-}" && $$code == 1 ]] || exit $$code; echo "Again what failed:"; $(PYTEST) --last-failed $(1))

# Idle OpenMP threads that spin cost a busy machine more than tenfold; no model hub is ever asked.
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and `make bench` use environments of their own from PyPI: .venv-peers with TRL and verl, .venv-engine with vLLM.
export PIP_ARGS
# Keeps pyright from asking PyPI whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export DEMO_STEPS

.PHONY: help install demo docs bench test test-fake-cuda gpu-check rehearse test-more test-slow test-engine test-engine-slow test-async lint types format generated clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12
	@echo "Variables such as PYTHON and TORCH_INDEX_URL are explained at the head of the Makefile."

install: $(STAMP) ## Make .venv with everything that the demo and the tests need

$(STAMP): pyproject.toml $(CONSTRAINTS) tools/make_venv.sh
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" \
		bash tools/make_venv.sh .venv $(CONSTRAINTS)
	@touch $@

demo: install ## Align a real language model on this machine's CPU and write a report of it
	$(BIN)/python examples/demo/run_demo.py $(DEMO_ARGS)

docs: install ## The documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "written; look at it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000"

bench: install ## Time and memory of a training step, beside TRL's on the same inputs
	@# Both sides as they are shipped: idle threads wait as the library has it.
	env -u GOMP_SPINCOUNT $(BIN)/python benchmarks/compare_trl.py $(BENCH_ARGS)

test: install lint types ## Lint, types and the fast tests: some minutes
	$(call run_tests,$(PYTEST_ARGS))

test-more: install ## The tests marked `more`, and the GPU path on fake CUDA: about 20 minutes
	@# 5: PYTEST_ARGS chose none of these.
	$(call run_tests,-m "more and not slow and not gpu and not engine" $(PYTEST_ARGS)) || [[ $$? == 5 && -n "$(PYTEST_ARGS)" ]]
	@$(MAKE) --no-print-directory test-fake-cuda

test-fake-cuda: install ## The GPU path on fake CUDA tensors; part of `make test-more`
	@# 5: PYTEST_ARGS chose none of these.
	export FAKE_CUDA=1; $(call run_tests,tests/fake_cuda -m "not slow and not engine" $(PYTEST_ARGS)) || [[ $$? == 5 && -n "$(PYTEST_ARGS)" ]]

# A bare GPU machine has an environment of its own, and no index to make .venv from.
gpu-check: ## The GPU path on this machine's GPU, proven in ten minutes
	$(or $(PYTHON),$(wildcard $(BIN)/python),python3) tools/gpu_check.py $(GPU_CHECK_ARGS)

rehearse: install ## What a GPU machine would run, on this CPU with the GPU image's packages
	@PIP_ARGS="$(PIP_ARGS)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" IMAGE_PYTHON="$(IMAGE_PYTHON)" \
		$(BIN)/python tools/rehearse.py $(REHEARSE_ARGS)

test-slow: install ## The tests that take minutes, but for those of `make test-async`
	$(call run_tests,-m "slow and not gpu and not engine" $(ASYNC:%=--ignore %) $(PYTEST_ARGS))
	@# As in test-fake-cuda.
	export FAKE_CUDA=1; $(call run_tests,tests/fake_cuda -m "slow and not engine" $(PYTEST_ARGS)) || [[ $$? == 5 && -n "$(PYTEST_ARGS)" ]]

test-engine: install ## Generation by the real vLLM on this machine's CPU
	@# Each worker has an engine of its own beside the trainer. Classes of a file run beside each other.
	$(PYTEST) --dist loadscope -m "engine and not slow and not gpu" $(ASYNC:%=--ignore %) $(PYTEST_ARGS)

test-engine-slow: install ## The tests with vLLM that `make test-engine` leaves out
	$(PYTEST) --dist loadscope -m "engine and slow and not gpu" $(ASYNC:%=--ignore %) $(PYTEST_ARGS)

test-async: install ## Generation on ranks of its own, quick tests and slow ones, and updates of an engine in flight
	$(PYTEST) -m "" $(ASYNC) $(PYTEST_ARGS)

generated: install ## Write what follows from the code: reference pages, shipped YAML, schemas, lists of errors and imports
	$(BIN)/python tools/config_docs.py --write
	$(BIN)/python tools/error_keys.py --write
	$(BIN)/python tools/house.py --write

lint: install ## ruff: rules and format; bounds on how densely code is written
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/density.py --check

types: install ## pyright
	$(BIN)/pyright

format: install ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove all environments, the site and the caches of the tools; results and prepared models stay
	rm -rf .venv .venv-peers .venv-engine .venv-image .wheels-image site .pytest_cache .ruff_cache .hypothesis *.egg-info
	find reinforce_rl examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
