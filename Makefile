# Everything runs in .venv, which the first target that needs it creates from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS   ?= 2

.PHONY: demo check lint types imports test test-slow bench clean
.DEFAULT_GOAL := check

# The main job: the best layout for DeepSeek-R1 on 32 H200, over every legal tp, dp, ep and the given dcp sizes.
demo: $(VENV)/.run
	$(BIN)/throughput_optimizer deepseek-ai/DeepSeek-R1 --device H200_SXM --num-devices 32 \
	  --input-length 4000 --output-length 1000 --ttft-limit 5000 --tpot-limit 50 --dcp-sizes 1,2,4,8

# Everything that CI checks.
check: lint types imports test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.main_job
	$(BIN)/python -m benchmarks.pricing

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev]"
	touch $@ $(VENV)/.run
