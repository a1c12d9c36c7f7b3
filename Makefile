# Every target makes the environment .venv first, if it is absent or older than the pins.
#
#   make demo        train two small hybrid models, reload and use them    (ARGS=--restart to start over)
#   make test        what continuous integration runs, under 15 minutes on two cores; prints the ten slowest
#   make contract NAME=gla   all that looks at one mixer, optimizer or other part, in a minute
#   make test-all    the longer checks too, with all extras
#   make check       formatting, lint, types
#   make bench       the benchmark program                                  (ARGS="…" for its flags)
#
# PYTHON chooses the interpreter (3.11 or newer). On Linux with an NVIDIA GPU or without, plain pip may fetch a large
# CUDA build of torch; to choose another, give pip's flags for it: make demo TORCH_INDEX="--index-url <index of CPU builds>".

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_ALL := $(VENV)/.installed-all
ARGS ?=

.PHONY: demo test contract test-all check bench
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; choose it with PYTHON=…"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; choose it with PYTHON=…")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(STAMP_ALL): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,triton,peft,plots,embeddings,eval,quantization,trl]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" --durations=10 $(ARGS)

contract: $(STAMP)
	@test -n "$(NAME)" || { echo "Say which part: make contract NAME=gla"; exit 1; }
	$(BIN)/python -m pytest -m "not slow" --name $(NAME) $(ARGS) tests/configuration tests/contract tests/mixers tests/modeling \
		tests/optim tests/hub/test_old_checkpoints.py tests/test_documentation.py

test-all: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python scripts/benchmark_mixers.py $(ARGS)
