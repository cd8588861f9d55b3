# Commands of this repository. `make up` and `make test` start from a bare clone and need Python 3.11 to 3.13.
#
#   make up ARGS="--engine simulated --prefill 2"    arguments of `kvmesh up`
#   make test ARGS="tests/unit -k hashes"            arguments of pytest; without: the whole suite
#
# KVMESH_VENV, KVMESH_CACHE   where packages and downloads go (.venv, .cache)
# KVMESH_ENGINE_BUILD         engine build: cpu, gpu or none (simulated engines only); by default what the machine has
# KVMESH_PYTHON               which Python to build on

KVMESH_VENV ?= $(CURDIR)/.venv
KVMESH_CACHE ?= $(CURDIR)/.cache
export KVMESH_VENV KVMESH_CACHE

BIN := $(KVMESH_VENV)/bin
ARGS ?=

# Set-up writes to standard error only and is silent when there is nothing to do.
SETUP = python=$$(sh scripts/python.sh) && "$$python" scripts/set_up.py
# SGLang has a virtual environment of its own, which only its users need.
SETUP_SGLANG = python=$$(sh scripts/python.sh) && "$$python" scripts/set_up_sglang.py

.PHONY: help up compose test setup check format proto contracts lock audit evidence bench mutate clean
.DEFAULT_GOAL := help

help: ## Show the commands
	@sed -n 's/^\([a-z]*\): .*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

up: ## Install what is missing and start a whole mesh on this machine
	@$(SETUP)
	@$(if $(findstring sglang,$(ARGS) $(KVMESH_ENGINE)),$(SETUP_SGLANG))
	@exec "$(BIN)/kvmesh" up $(ARGS)

compose: ## Build the images and start the whole stack of compose/ in containers
	@docker compose -f compose/compose.yaml up --build --detach --wait $(ARGS)

test: setup ## Install what is missing and run the tests, a file of tests on each of two processors at a time
	@"$(BIN)/python" -m pytest -n 2 --dist loadfile $(ARGS)

setup: ## Only install: packages, engine, the tests' real servers
	@$(SETUP) --tests
	@$(SETUP_SGLANG)

check: setup ## Format, lint, types, import contracts, protos, generated code; all of them, whatever fails
	@status=0; \
	run() { echo "$$*"; "$(BIN)/$$@" || status=1; }; \
	run ruff format --check --quiet .; \
	run ruff check --quiet .; \
	run mypy; \
	run python scripts/check_imports.py; \
	run buf lint; \
	run buf breaking --against protos/contracts.binpb; \
	run python scripts/generate_protos.py --check; \
	run python scripts/support_matrix.py --check; \
	run python scripts/settings_page.py --check; \
	run python scripts/api_fields.py --check; \
	run python scripts/error_reasons.py --check; \
	run python scripts/migration_guides.py --check; \
	run python scripts/compose_files.py --check; \
	exit $$status

format: setup ## Format the code and mend what the linter can mend
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

proto: setup ## Generate kvmesh/api from protos/
	"$(BIN)/python" scripts/generate_protos.py

contracts: setup ## Write protos/contracts.binpb, which `make check` compares the contracts with
	"$(BIN)/buf" build --exclude-source-info -o protos/contracts.binpb

lock: setup ## Write constraints*.txt from what .venv holds, and the digests of their wheels
	"$(BIN)/python" scripts/write_lock.py

audit: ## Compare the lock with known vulnerabilities, and write bills of materials to run/; of images named in ARGS
	@python=$$(sh scripts/python.sh) && "$$python" scripts/audit.py $(ARGS)

evidence: setup ## Run the tests that prove engine features, and write the support matrix from what passed
	@record=$$(mktemp) && \
	{ KVMESH_EVIDENCE="$$record" "$(BIN)/python" -m pytest -q -m proves tests/conformance tests/integration tests/unit $(ARGS); status=$$?; \
	"$(BIN)/python" scripts/support_matrix.py --record "$$record" || status=1; rm -f "$$record"; exit $$status; }

bench: setup ## Run the load scenarios against a mesh of simulated engines
	@"$(BIN)/python" -m bench $(ARGS)

mutate: setup ## Plant defects in a copy, one at a time, and check that tests catch them
	@"$(BIN)/python" scripts/mutate.py $(ARGS)

clean: ## Remove all that set-up, tests and checks wrote
	rm -rf "$(KVMESH_VENV)" "$(KVMESH_VENV)-sglang" "$(KVMESH_CACHE)" kvmesh.egg-info build dist
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvmesh services scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
