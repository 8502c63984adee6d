# `make demo` and `make test` require only Python 3.11 or later; they install everything else into .venv.

VENV := .venv
BIN := $(VENV)/bin
# More than the cores, because tests wait for processes, and few, because each one imports and collects everything. A
# process gets tests that stand together, which share fixtures.
JOBS ?= 4
PARALLEL = -n $(JOBS) --dist worksteal
UV ?= uv
# mitmproxy pins versions that the server cannot have, so it has an environment of its own. The server finds it
# next to the one that it runs in.
MITMPROXY := .venv-mitmproxy

# Images of containers often set it. Every process that a test starts would then compile the whole project first,
# and every process of pytest rewrite the assertions of all tests, which doubles the time that both need to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help bundle demo test check lint tests types test-all test-rest test-long docs format lock mitmproxy clean

help:
	@echo "make demo    start a server and play a task on it, showing each step (TASK=... or ALL=1)"
	@echo "make test    run format, lint, layers, types and the fast tests (PYTEST='...' adds pytest arguments)"
	@echo "make check   the same, without installing anything first"
	@echo "make types   check all types; make test checks what has changed"
	@echo "make test-all   also run the slow tests, and those that need a Docker engine"
	@echo "make test-long  run the tests that take hours: python -m tests.long_parts --help"
	@echo "make docs    build the site in build/site"
	@echo "make format  format the code and fix what the linter can fix"
	@echo "make bundle  build the bundle for Claude Desktop, dist/decathlon-mcp-VERSION.mcpb (needs the network)"
	@echo "make mitmproxy  install mitmdump for --web into $(MITMPROXY)"
	@echo "make lock    pin the newest compatible dependencies (needs uv)"
	@echo "make clean   remove what these commands created"
	@echo
	@echo "To run one test: .venv/bin/pytest tests/cli/test_help.py::test_version_is_printed"

demo: $(VENV)/.installed
	@$(BIN)/decathlon-mcp demo $(if $(ALL),--all) $(if $(TASK),--task $(TASK))

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory check

# Beside each other: the tests wait half of the time.
check:
	@$(MAKE) --no-print-directory -j 2 lint tests

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/changed-types --pythonpath $(BIN)/python

tests: build/.compiled
	$(BIN)/python -m pytest $(PARALLEL) -m "$(FAST)" $(PYTEST)

types: $(VENV)/.installed-dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# What `make test` runs needs no engine, and few processes.
FAST := not docker and not slow and not long

# In a new checkout each of pytest's processes would compile everything, since all start at once.
build/.compiled:
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true  # errors are shown by the tests' own run
	@mkdir -p build && touch $@

test-all: test
	@$(MAKE) --no-print-directory test-rest

test-rest: $(VENV)/.installed-dev build/.compiled
	$(BIN)/python -m pytest $(PARALLEL) -m "(docker or slow) and not long" $(PYTEST)

test-long: $(VENV)/.installed-dev
	$(BIN)/python -m tests.long_parts

# Every Sphinx warning is an error; docs/conf.py describes the site.
docs: $(VENV)/.installed-docs
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . build/site
	@echo "The site is in build/site/index.html"

bundle: $(VENV)/.installed-dev
	@$(BIN)/python packaging/build_bundle.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Uses the first of these that is Python 3.11 or later and has venv; $(PYTHON) comes first if it is set.
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
	    echo "Python 3.11 or later is required, but none was found; give its path: make PYTHON=/path/to/python3" >&2; \
	fi; \
	exit 1

# Shows progress; locked dependencies are verified by hash.
INSTALL = $(BIN)/python packaging/install.py

# The project itself is installed as an editable package.
$(VENV)/.installed: requirements.lock pyproject.toml $(BIN)/python
	@$(INSTALL) requirements.lock
	@echo "decathlon-mcp: linking this folder into $(VENV)"
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --require-virtualenv \
	    --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	@$(INSTALL) requirements-dev.lock
	@touch $@

# Sphinx imports the packages that the reference pages describe.
$(VENV)/.installed-docs: requirements-docs.lock $(VENV)/.installed
	@$(INSTALL) requirements-docs.lock
	@touch $@

mitmproxy: $(MITMPROXY)/.installed

$(MITMPROXY)/.installed: requirements-mitmproxy.lock $(BIN)/python
	@echo "Installing requirements-mitmproxy.lock into $(MITMPROXY)"
	@$(BIN)/python -m venv $(MITMPROXY)
	@$(MITMPROXY)/bin/python -m pip --disable-pip-version-check --quiet install --require-virtualenv \
	    --require-hashes -r requirements-mitmproxy.lock
	@touch $@

# For all platforms and Python versions from 3.11; the second and third files add to the first.
COMPILE = $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-annotate --custom-compile-command "make lock"

lock:
	echo "hatchling" | $(COMPILE) pyproject.toml - --extra server --extra starter -o requirements.lock
	$(COMPILE) --group dev --constraint requirements.lock -o requirements-dev.lock
	$(COMPILE) --group docs --constraint requirements.lock --constraint requirements-dev.lock -o requirements-docs.lock
	echo "mitmproxy>=11,<13" | $(COMPILE) - -o requirements-mitmproxy.lock

clean:
	rm -rf $(VENV) $(MITMPROXY) build .pytest_cache .ruff_cache .import_linter_cache
