# Everything a fresh machine needs is Python >= 3.11 with pip.
#   make demo    whole search (45 trials) on an embedded model, its result, and the analysis of it in results/
#   make test    all tests
#   make check   formatting, lint, types and the fast tests
#   make format  rewrite the code in the project's format
#   make train   train the embedded models again (about 15 minutes on one core)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test check format train clean

demo: $(READY)
	$(BIN)/python -m tune_prune.search --model tiny-llama
	@echo
	$(BIN)/python -m tune_prune.analysis ray_results/tiny-llama-20-paper_grid --output results

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train: $(READY)
	$(BIN)/python scripts/train_embedded_models.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; say which: make PYTHON=python3.11 demo"; exit 2; }
	@echo "setting up $(VENV) with the versions of constraints.txt (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
