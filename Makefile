# Everything a developer or a new user runs. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a process: threads that spin while they wait starve the others on a small machine.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help quickstart test test-sglang test-vllm test-openenv lint kill-trainer chaos format protos protos-check charts namespaces release-protos \
	clean setup-quickstart setup-dev setup-deploy

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

quickstart: setup-quickstart ## Set everything up and run the main job
	$(BIN)/leeway up examples/quickstart.yaml --fresh

test: setup-dev setup-deploy ## Set everything up and pass the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup-dev protos-check ## Check style, types, protos and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	cd protos && ../$(BIN)/buf breaking --against released.binpb

test-sglang: setup-dev $(VENV)-sglang/.ready ## Pass the engine contract on a real SGLang server, on CPU
	LEEWAY_SGLANG_PYTHON=$(CURDIR)/$(VENV)-sglang/bin/python \
		$(BIN)/python -m pytest tests/rollout/test_engine_contract.py tests/gateway/test_constraints.py

test-vllm: setup-dev $(VENV)-vllm/.ready ## Pass the engine contract on a real vLLM server, on CPU
	LEEWAY_VLLM_PYTHON=$(CURDIR)/$(VENV)-vllm/bin/python \
		$(BIN)/python -m pytest tests/rollout/test_engine_contract.py tests/gateway/test_constraints.py

test-openenv: setup-dev $(VENV)-openenv/.ready ## Pass the OpenEnv adapter's tests on its real server
	LEEWAY_OPENENV_PYTHON=$(CURDIR)/$(VENV)-openenv/bin/python \
		$(BIN)/python -m pytest tests/agents/test_openenv.py

$(VENV)-openenv/.ready:
	tests/openenv/install.sh $(VENV)-openenv
	@touch $@

# Virtual environments of their own (2.7 and 3.5 GB): their pins are not ours.
$(VENV)-sglang/.ready:
	tests/sglang_cpu/install.sh $(VENV)-sglang
	@touch $@

$(VENV)-vllm/.ready:
	tests/vllm_cpu/install.sh $(VENV)-vllm
	@touch $@

kill-trainer: setup-dev ## Kill trainers 20 times at random moments; their runs must not differ
	LEEWAY_KILLS=20 $(BIN)/python -m pytest tests/test_killed_trainer.py

chaos: setup-dev ## Train through 300 random faults of every process (a quarter of an hour)
	$(BIN)/python -m benchmarks.chaos --faults 300

format: setup-dev ## Format the code and the protos
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd protos && ../$(BIN)/buf format --write

GENERATE = $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) \
	--grpc_python_out=$(1) protos/leeway/v1/*.proto

protos: setup-dev ## Generate leeway/v1 from protos/
	$(call GENERATE,.)

protos-check: setup-dev ## Prove that leeway/v1 is what protos/ generate
	@rm -rf build/protos && mkdir -p build/protos
	@$(call GENERATE,build/protos)
	@diff -r -x __init__.py -x __pycache__ build/protos/leeway/v1 leeway/v1 \
		|| { echo "leeway/v1 is not current: run make protos"; exit 1; }

charts: setup-dev ## Write what follows from the configuration: schemas, golden manifests
	$(BIN)/python -m deploy.helm.derive
	$(BIN)/python -m tests.deploy.test_manifests

namespaces: setup-dev setup-deploy ## Run two clusters in network namespaces, as root, in full length
	LEEWAY_NAMESPACES=full $(BIN)/python -m pytest -x -s tests/deploy/test_distance.py tests/deploy/test_namespaces.py

release-protos: setup-dev ## Take today's wire as the one that the next release must understand
	cd protos && ../$(BIN)/buf build --exclude-source-info --output released.binpb

clean: ## Remove what the targets made, except downloaded models
	rm -rf $(VENV) .tools build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make the second time fast.
setup-quickstart: $(VENV)/.quickstart
setup-dev: $(VENV)/.dev
setup-deploy: .tools/.ready

$(VENV)/.quickstart: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[quickstart]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# Benchmarks are no part of the package: with this they also run as files, `python benchmarks/queue.py`.
	@echo '$(CURDIR)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
	@touch $@ $(VENV)/.quickstart

# Binaries for Linux; elsewhere the tests that need them say so.
.tools/.ready: tests/deploy/fetch_tools.sh | $(BIN)/python
	@if [ "$$(uname)" = Linux ]; then PYTHON=$(BIN)/python tests/deploy/fetch_tools.sh .tools; fi
	@mkdir -p .tools && touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
