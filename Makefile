# Everything a developer runs. `make` alone lists the targets; each sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=
CHAOS_SECONDS ?= 300

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench chaos docs constraints clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything, at the versions of constraints.txt

# torch goes first and alone: its exact pin also matches a CPU build (2.13.0+cpu), which is then taken where one is offered.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[workers,embedded,plots,dev]'
	@touch $@

demo: $(STAMP) ## Four tenants train together on one machine, shown cycle by cycle
	@$(BIN)/mainspring demo

test: $(STAMP) ## Run all tests, a short chaos run among them
	@$(BIN)/python -m pytest -m 'not gpu' $(PYTEST_ARGS)

check: $(STAMP) ## Lint, format, types and import rules
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP) ## Measure; tables on screen, numbers in benchmarks/results
	@for file in benchmarks/[a-z]*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done

chaos: $(STAMP) ## Kill clocks, workers, clients and Redis for a while; everything must still add up
	@CHAOS_SECONDS=$(CHAOS_SECONDS) $(BIN)/python -m pytest -s tests/chaos $(PYTEST_ARGS)

docs: $(STAMP) ## Write the tables of settings, keys and errors in docs/ anew from the code
	@$(BIN)/python -m tests.doc_tables

constraints: $(STAMP) ## Write constraints.txt anew from what .venv has now
	@$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed -e 's/+cpu$$//' -e '/^#/d' -e '/^nvidia-/d' -e '/^triton==/d' > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove .venv, caches and what runs have left behind
	rm -rf $(VENV) build dist demo-out mainspring-data .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
