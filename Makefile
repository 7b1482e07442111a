# Everything runs from a clean clone with Python 3.11 to 3.13, make and a C++ compiler; .venv is made on the way.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

# One thread a process: the tests run in two of them.
test: export OMP_NUM_THREADS = 1

# Where bytecode is not written, every process compiles torch anew: 8 seconds to import linvit in place of 3.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test lint format docs wheel demo venv clean

test: $(INSTALLED)
	$(BIN)/pytest -q -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(BIN)/python scripts/docs.py
	$(BIN)/python scripts/edge.py docs
	$(BIN)/python -m scripts.auto
	$(BIN)/mkdocs build --strict --quiet

wheel: $(INSTALLED)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

demo: $(INSTALLED)
	$(BIN)/python -m scripts.demo

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
