# Everything a fresh machine needs is Python >= 3.11 with pip.
#   make demo    whole search (45 trials) on an embedded model, its analysis in results/, its best model in results/tiny-llama-pruned
#   make test    the tests, but for those that make test-slow runs: whole searches, kills of them, benchmarks, and most of what takes
#                five seconds (twenty minutes more)
#   make test-oldest   the tests of checkpoints with the oldest packages that pyproject.toml admits, in .venv-oldest
#   make torture   searches that are killed at random moments, for ten minutes (docs/reliability.md)
#   make lint    formatting, lint, types
#   make check   lint and make test
#   make format  rewrite the code in the project's format
#   make study   the study of SmolLM2-135M, hours (docs/gguf.md); STUDY="--data-dir DATA --limit 100" are its flags
#   make train   train the embedded models again (15 to 30 minutes on one core)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.installed

# A process that imports torch and this package compiles them once, and not every time it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-oldest torture study lint check format train clean

demo: $(READY)
	$(BIN)/python -m tune_prune.search --model tiny-llama
	@echo
	$(BIN)/python -m tune_prune.analysis ray_results/tiny-llama-20-paper_grid --output results
	@echo
	$(BIN)/python -m tune_prune.prune --config ray_results/tiny-llama-20-paper_grid --output results/tiny-llama-pruned --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

test-oldest: $(OLDEST_READY)
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider tests/checkpoint/test_checkpoint_loading.py tests/checkpoint/test_checkpoint_tools.py tests/pruning/test_surgery.py

torture: $(READY)
	$(BIN)/python scripts/torture $(TORTURE)

study: $(READY)
	$(BIN)/python scripts/study_smollm2.py $(STUDY)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train: $(READY)
	$(BIN)/python scripts/train_embedded_models.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; name one: make PYTHON=python3.11 demo"; exit 2; }
	@echo "setting up $(VENV) with the versions of constraints.txt (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

$(OLDEST_READY): pyproject.toml scripts/oldest_requirements.py
	@echo "setting up $(OLDEST) with the oldest versions that pyproject.toml admits (a few minutes, once)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python scripts/oldest_requirements.py > $(OLDEST)/requirements.txt
	@$(OLDEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement $(OLDEST)/requirements.txt
	@touch $(OLDEST_READY)

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
