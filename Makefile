# make demo   serve a small real model and ask it a question
# make test   everything a fresh machine can run
# make test-java, test-native, proof-kills   tiers that need an install, a card, or time
# PYTHON=/path/to/python3.11 chooses the interpreter; PIP_INDEX_URL, proxies and PIP_CERT are honoured by pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Some images forbid bytecode files: then each of the processes that the tests start would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
INSTALLED := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-dev

.PHONY: demo test check test-browser test-java test-node test-vllm test-native test-gpu proof-kills proof-reloads proof-fuzz proof-model-fuzz proof-embed-cycles proof-offline proof-chaos docs-faults references install install-dev clean

demo: $(INSTALLED)
	@$(BIN)/llamarack demo

# Files side by side, more of them than cores: most tests wait (docs/decisions/008). TEST_WORKERS=0 runs them in one.
TEST_WORKERS ?= 4
test: check
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not vllm and not browser and not java and not node and not gpu"

test-java: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m java

# The real vLLM on the processor, in an environment of its own: several minutes to install, some thirty to run.
VLLM_TESTS ?= tests
test-vllm: $(DEVELOPMENT)
	python=$$(LLAMARACK_STATE_DIR=$(CURDIR)/build/vllm $(BIN)/llamarack engine install vllm --cpu) && \
	  $$python -m pip install --quiet --disable-pip-version-check accelerate gguf && \
	  LLAMARACK_REQUIRE_TIERS=vllm LLAMARACK_VLLM_PYTHON=$$python $(BIN)/python -m pytest -m vllm $(VLLM_TESTS)

# llama.cpp compiled for this machine, with its RPC devices: 20 minutes on two cores the first time.
test-native: $(DEVELOPMENT)
	binary=$$(LLAMARACK_STATE_DIR=$(CURDIR)/build/llamacpp $(BIN)/llamarack engine install llamacpp --native --rpc) && \
	  LLAMARACK_REQUIRE_TIERS=native LLAMARACK_LLAMA_SERVER=$$binary $(BIN)/python -m pytest -m native

# The dashboard in a headless Chromium: apt-get install --no-install-recommends chromium, or LLAMARACK_CHROMIUM=/path.
test-browser: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m browser

# The official OpenAI client for Node 18 or newer, from npm.
test-node: $(DEVELOPMENT)
	mkdir -p build/node && npm install --silent --no-audit --no-fund --prefix build/node openai@6.49.0
	LLAMARACK_REQUIRE_TIERS=node $(BIN)/python -m pytest -m node

test-gpu: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m gpu

# Long forms of what `make test` does shortly.
proof-kills: $(DEVELOPMENT)
	LLAMARACK_KILLS=200 $(BIN)/python -m pytest tests/supervise/test_kills.py

proof-reloads: $(DEVELOPMENT)
	LLAMARACK_RELOADS=10 LLAMARACK_RELOADS_RESULT=benchmarks/results/reloads.json \
	  $(BIN)/python -m pytest tests/supervise/test_change.py -k rolling_reloads

proof-chaos: $(DEVELOPMENT)
	LLAMARACK_CHAOS_S=1800 LLAMARACK_CHAOS_RESULT=$(CURDIR)/benchmarks/results/chaos.json \
	  $(BIN)/python -m pytest -s tests/supervise/test_chaos.py

# docs/faults.md from the tests' marks and times.
docs-faults: $(DEVELOPMENT)
	$(BIN)/python -m tests.supervise.faults

proof-fuzz: $(DEVELOPMENT)
	$(BIN)/python -m benchmarks.fuzz_api

proof-model-fuzz: $(DEVELOPMENT)
	$(BIN)/python -m tests.model.fuzz -o benchmarks/results/model-fuzz.json

proof-embed-cycles: $(DEVELOPMENT)
	$(BIN)/python -m benchmarks.embed_cycles -o benchmarks/results/embed-cycles.json

# docs/reference/*.md from the code.
references: $(DEVELOPMENT)
	$(BIN)/python docs/reference/generate.py

# Bundle, install, demo, serve and bench in a network namespace: as root, or where users may make namespaces.
proof-offline: $(DEVELOPMENT)
	$(BIN)/python -m benchmarks.offline_run

check: $(DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)
install-dev: $(DEVELOPMENT)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "llamarack needs Python 3.11 or newer; $$($(PYTHON) --version) found" >&2; \
	  echo "hint: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "this Python cannot make virtual environments" >&2; \
	  echo "hint: install your distribution's python3-venv package" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEVELOPMENT): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@ $(INSTALLED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
