# `make demo` and `make test` need Python 3.11 or later and nothing else; both set themselves up in .venv.

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
UV ?= uv

.PHONY: help bundle demo test check docs format lock clean

help:
	@echo "make demo    play a task through a server of its own, each step shown (TASK=... or ALL=1)"
	@echo "make test    check everything: format, lint, layers, types, tests (PYTEST='...' picks tests)"
	@echo "make docs    build the site in build/site"
	@echo "make format  put the code in order"
	@echo "make bundle  make the bundle for Claude Desktop, dist/decathlon-mcp-VERSION.mcpb (needs the network)"
	@echo "make lock    pin the newest dependencies that fit (needs uv)"
	@echo "make clean   remove what these have made"

demo: $(VENV)/.installed
	@$(BIN)/decathlon-mcp demo $(if $(ALL),--all) $(if $(TASK),--task $(TASK))

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory check

# What failed beside others is tried once more by itself: machines are shared, and a fault repeats.
check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST) || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# Every Sphinx warning is an error; docs/conf.py describes the site.
docs: $(VENV)/.installed-docs
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . build/site
	@echo "The site is there: build/site/index.html"

bundle: $(VENV)/.installed-dev
	@$(BIN)/python packaging/build_bundle.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The newest Python that starts and is not too old; $(PYTHON) where one is given.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    found=$$("$$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
	    if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	        without="$$without $$found-venv"; continue; \
	    fi; \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	done; \
	if [ -n "$$without" ]; then \
	    set -- $$without; \
	    echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install $$1" >&2; \
	else \
	    echo "Python 3.11 or later is needed, and none was found; say where one is: make PYTHON=/path/to/python3" >&2; \
	fi; \
	exit 1

PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet install --require-virtualenv

# What is locked comes with its hash; then the project itself, as it lies here.
$(VENV)/.installed: requirements.lock pyproject.toml $(BIN)/python
	@echo "Installing what requirements.lock pins into $(VENV)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	@echo "Installing what requirements-dev.lock pins into $(VENV)"
	@$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@

# Sphinx imports the packages that the reference pages describe.
$(VENV)/.installed-docs: requirements-docs.lock $(VENV)/.installed
	@echo "Installing what requirements-docs.lock pins into $(VENV)"
	@$(PIP) --require-hashes -r requirements-docs.lock
	@touch $@

# For every platform and every Python from 3.11; the second and third hold what is wanted beside the first.
COMPILE = $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-annotate --custom-compile-command "make lock"

lock:
	echo "hatchling" | $(COMPILE) pyproject.toml - --extra server --extra starter --extra play -o requirements.lock
	$(COMPILE) --group dev --constraint requirements.lock -o requirements-dev.lock
	$(COMPILE) --group docs --constraint requirements.lock --constraint requirements-dev.lock -o requirements-docs.lock

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .import_linter_cache
