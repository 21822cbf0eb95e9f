# Two commands are enough: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3.11
PY := .venvs/vllm/bin/python
MODEL := .models/smollm2-135m-instruct
ENGINE ?= vllm
ARGS ?=
SEEDS ?= 10000

FOUND_PYTHON = command -v $(PYTHON) >/dev/null || \
	{ echo "$(PYTHON) is not on the PATH: install Python 3.11, or name it: make PYTHON=..." >&2; exit 1; }

# No test, no demo and no check asks a model hub for anything.
export HF_HUB_OFFLINE = 1
# uv leaves bytecode to the first import (tools/envs.py). Where none may be written, each interpreter compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-gpu test-integrations smoke bench bench-gpu bench-batch bench-trainers bench-scale bench-network bench-replicas plots simulate versions models docs site lint format setup engines megatron trl verl lock model clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Options go in ARGS, as in: make test ARGS='-k digest -x', make demo ARGS='--steps 3'"
	@echo "  demo and bench run on vLLM, or with ENGINE=sglang on SGLang"

demo: setup model $(if $(filter sglang,$(ENGINE)),engines) ## train SmolLM2-135M for a few RL steps while it is being served, and prove what the engine holds
	@$(PY) examples/rl_smollm2/run.py --engine $(ENGINE) --model $(MODEL) $(ARGS)

test: ## the tests to pass before a merge, on real engines and trainers (about 25 minutes on 2 cores, more on slow ones)
	@$(MAKE) --no-print-directory --jobs 3 setup engines megatron
	@$(PY) -m pytest $(ARGS)

test-full: ## those and all their variants, half a million simulated jobs, long storms on real engines (an hour and more)
	@$(MAKE) --no-print-directory --jobs 3 setup engines megatron
	@WEIGHTWIRE_TEST_FULL=1 $(PY) -m pytest -m "not integration" $(ARGS)

test-integrations: ## other projects' trainers that sync through us, for real, in environments of their own; without ARGS it writes docs/versions.md
	@$(MAKE) --no-print-directory --jobs 3 setup engines megatron trl verl
	@$(if $(ARGS),$(PY) -m pytest -n 0 -m integration tests/integrations $(ARGS),$(PYTHON) tools/versions.py --integrations)

test-gpu: ## the tests that need a GPU, with an interpreter that has torch for CUDA and transformers: PYTHON=
	@$(PYTHON) -c 'import pytest, torch, transformers' || { echo 'make test-gpu needs PYTHON=, an interpreter with torch for CUDA, transformers and pytest: docs/gpu.md'; exit 1; }
	@$(PYTHON) -m pytest -o addopts= tests/gpu $(ARGS)

bench-gpu: ## updates within one GPU against a copy there, with such an interpreter; writes benchmarks/results/gpu.json: PYTHON=
	@$(PYTHON) -c 'import torch, transformers' || { echo 'make bench-gpu needs PYTHON=, an interpreter with torch for CUDA and transformers: docs/gpu.md'; exit 1; }
	@$(PYTHON) -m benchmarks.gpu $(ARGS)

smoke: setup engines ## the tests to run before each push: the main promises, in about 3 minutes
	@$(PY) -m pytest -m smoke $(ARGS)

bench: setup $(if $(filter sglang,$(ENGINE)),engines) ## measure an update against other ways and a plain memory copy; writes benchmarks/results/
	@$(PY) -m benchmarks.update --engine $(ENGINE) $(ARGS)

bench-trainers: setup megatron ## measure each trainer's slices against gathering and a memory copy; writes benchmarks/results/trainers.json
	@$(PY) -m benchmarks.trainers $(ARGS)

bench-batch: setup ## measure rows from owners to consumers against msgpack, Ray and TransferQueue; writes benchmarks/results/batch.json
	@$(PY) -m benchmarks.batch $(ARGS)

bench-scale: setup ## simulate 1 to 256 replicas with each fan-out and measure the control plane; writes benchmarks/results/scale.json
	@$(PY) -m benchmarks.scale $(ARGS)

bench-network: setup ## measure updates over a link of 1 and 10 Gbit/s, everything and only what changed; writes benchmarks/results/network.json
	@$(PY) -m benchmarks.network $(ARGS)

bench-replicas: setup ## measure 1 to 3 replicas of one host, by one segment and by a zone of each; writes benchmarks/results/replicas.json
	@$(PY) -m benchmarks.replicas $(ARGS)

plots: setup ## make the benchmarks' pictures, and the figures in README and docs/benchmarks.md, again from benchmarks/results/*.json
	@$(PY) -m benchmarks.plots $(ARGS)
	@$(PY) -m benchmarks.tables $(ARGS)

simulate: setup ## run SEEDS simulated jobs under faults, on all cores; a violation is printed as a seed that replays
	@$(PY) -m tests.simulation --seeds $(SEEDS) $(ARGS)

docs: setup site ## check the pages' links, names and code, and build them as a site, build/site
	@$(PY) -m pytest -n 0 -q tests/docs

site: ## only build the site, strictly and without a network (its environment: half a minute, 40 MB)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py docs
	@NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --strict --quiet
	@echo "built: build/site/index.html"

versions: setup engines ## run the core of the engine suite with every supported vLLM and SGLang, each from its own lock and removed afterwards; writes docs/versions.md
	@$(PYTHON) tools/versions.py $(ARGS)

models: setup engines ## update tiny models of every family in vLLM and SGLang, and compare with fresh engines; writes docs/models.md
	@$(PY) -m tools.models $(ARGS)

lint: setup ## ruff, mypy --strict, import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venvs/vllm/bin/lint-imports
	@.venvs/vllm/bin/lint-imports --config tools/import_cycles.toml

format: setup ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

setup: ## the development environment .venvs/vllm (the first time a minute or two, 750 MB to download, 3 GB of disk)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py vllm

engines: ## the environments of the tests' other engines, .venvs/sglang and .venvs/vllm-old (a minute or two, 2 GB more)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py sglang vllm-old

megatron: ## the environment of the tests' Megatron trainers, .venvs/megatron (under a minute, 0.2 GB more)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py megatron

trl: ## the environment of the tests' TRL trainers, .venvs/trl, without an engine (a minute)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py trl

verl: ## the environment of the tests' verl trainers, .venvs/verl, without an engine (a minute)
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/envs.py verl

lock: ## pin the packages of each environment again, requirements/*.txt; ARGS=--upgrade takes the newest ones
	@$(FOUND_PYTHON)
	@$(PYTHON) tools/lock.py $(ARGS)

model: setup ## the demo's model, .models/smollm2-135m-instruct (93 MB to download the first time)
	@$(PY) tools/smollm2.py --out $(MODEL)

clean: ## remove build products and caches; environments and models stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venvs/*' -prune -exec rm -rf {} +

distclean: clean ## also the environments and models: the next command sets up from nothing
	@rm -rf .venvs .models
