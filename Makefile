# Two commands are enough: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3.11
PY := .venvs/vllm/bin/python
MODEL := .models/smollm2-135m-instruct
ENGINE ?= vllm
ARGS ?=

# No test, no demo and no check asks a model hub for anything.
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test bench bench-trainers bench-scale lint format setup engines megatron model clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Options go in ARGS, as in: make test ARGS='-k digest -x', make demo ARGS='--steps 3'"
	@echo "  demo and bench run on vLLM, or with ENGINE=sglang on SGLang"

demo: setup model $(if $(filter sglang,$(ENGINE)),engines) ## train SmolLM2-135M for a few RL steps while it is being served, and prove what the engine holds
	@$(PY) examples/rl_smollm2/run.py --engine $(ENGINE) --model $(MODEL) $(ARGS)

test: engines megatron ## every test that this machine can run
	@$(PY) -m pytest $(ARGS)

bench: setup $(if $(filter sglang,$(ENGINE)),engines) ## measure an update against other ways and a plain memory copy; writes benchmarks/results/
	@$(PY) -m benchmarks.update --engine $(ENGINE) $(ARGS)

bench-trainers: setup megatron ## measure each trainer's slices against gathering and a memory copy; writes benchmarks/results/trainers.json
	@$(PY) -m benchmarks.trainers $(ARGS)

bench-scale: setup ## simulate 1 to 256 replicas with each fan-out and measure the control plane; writes benchmarks/results/scale.json
	@$(PY) -m benchmarks.scale $(ARGS)

lint: setup ## ruff, mypy --strict, import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venvs/vllm/bin/lint-imports

format: setup ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

setup: ## the development environment .venvs/vllm (about 2 minutes and 3 GB the first time)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the PATH: install Python 3.11, or name it: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) tools/envs.py vllm

engines: setup ## the environment of the tests' second engine as well, .venvs/sglang (a minute and 3 GB more)
	@$(PYTHON) tools/envs.py sglang

megatron: setup ## the environment of the tests' Megatron trainers, .venvs/megatron (a minute and a half, 1 GB more)
	@$(PYTHON) tools/envs.py megatron

model: setup ## the demo's model, .models/smollm2-135m-instruct (93 MB to download the first time)
	@$(PY) tools/smollm2.py --out $(MODEL)

clean: ## remove build products and caches; environments and models stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venvs/*' -prune -exec rm -rf {} +

distclean: clean ## also the environments and models: the next command sets up from nothing
	@rm -rf .venvs .models
