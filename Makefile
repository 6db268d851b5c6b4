# Everything runs in .venv, which these targets make; to use another environment: make test VENV=/path/to/venv
VENV ?= .venv
BASE_PYTHON ?= python3
OUT ?= runs/quickstart
RECIPE ?= llama
THREADS ?= $(shell getconf _NPROCESSORS_ONLN)
export PATH := $(abspath $(VENV))/bin:$(PATH)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install install-dev quickstart quickstart-llama quickstart-mixtral proof bench test check fix test-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## set up the virtual environment

install-dev: $(VENV)/.installed-dev  ## the same, with what tests and linting need

quickstart: install quickstart-$(RECIPE)  ## offline: make a tiny model, train it, see its answers before and after

# One process on whatever the machine has; accelerate would give it one CPU thread
quickstart-llama:
	python scripts/make_tiny_model.py $(OUT)
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --json $(OUT)/before.json
	@printf '\n== Training ==\n'
	rm -rf $(OUT)/run  # else it would go on from its last checkpoint
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision no recipes/llama.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "Spell the word tiger."\n'

quickstart-mixtral:
	python scripts/make_tiny_model.py $(OUT) --num_local_experts 4 --intermediate_size 192
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --json $(OUT)/before.json
	@printf '\n== Training ==\n'
	rm -rf $(OUT)/run  # else it would go on from its last checkpoint
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision no recipes/mixtral.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "Spell the word tiger."\n'

check: install-dev  ## lint and the static tests, under a minute
	ruff check .
	python scripts/sync_recipes.py --check
	python -m pytest -q -n 2 tests/static

fix: install-dev  ## let the linter mend what it can
	ruff check --fix .

test: check  ## all tests that need no GPU; gpu tests show as skipped
	python -m pytest -q -rs -n 2 --dist worksteal tests/cpu tests/gpu

proof: install  ## measure every strategy and the planner, about 90 minutes on two cores; write the README's tables
	python scripts/parity.py --json results/parity.json
	python scripts/validate_planner.py --json results/planner.json
	python scripts/track_ranks.py --json results/planner_ranks.json
	python scripts/readme_tables.py

bench: install-dev  ## speed against a bare loop, Trainer and SFTTrainer: hours on two idle cores; needs GSM8K's rows
	python scripts/benchmark.py
	python scripts/benchmark_tables.py --picture results/speed.png
	python scripts/readme_tables.py

test-gpu: install-dev  ## the tests that need a GPU
	python -m pytest -q -rs tests/gpu

clean:  ## remove the environment and the runs
	rm -rf .venv runs
