# SPDX-License-Identifier: Apache-2.0
"""Plant known faults one at a time: a test of the net fails with each that passes without it.

    pytest evidence/test_planted_faults.py --all                        # about a quarter of an hour
    pytest evidence/test_planted_faults.py --all -k "best or flushed"

The measure of a net is what it catches, not what it covers. Each fault is an edit of a line in a
worktree of this commit, which the tests of the net launch in place of this checkout (NET_ROOT of
tests/net.py; the golden subjects import it).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
CORE = "recipes/core"
BATCHES = "recipes/core/batches.py"
ONE = "test_cells.py -k single-llama-full"
STOPS = "test_stops.py -k"
CHAINS = "test_chains.py -k"
GOLDEN = "../unit/test_golden.py -k"
SHORT = ("a refusal prints nothing",)
# {name: (file, the test of tests/launch that is to catch it, with pytest's -k, a text that is in
# the file once, what takes its place, more such pairs)}
FAULTS = {
    "the loss is divided by all tokens": (
        "recipes/llama.py",
        "test_judges.py",
        "num_trained_on, num_tokens = counts",
        "num_tokens, num_trained_on = counts",
    ),
    "targets are shifted by one in the batch": (
        BATCHES,
        ONE,
        "torch.from_numpy(trained_on - 1)",
        "torch.from_numpy(trained_on)",
    ),
    "labels are shifted by one in the row": (
        f"{CORE}/chat.py",
        f"{GOLDEN} trained_on",
        "inside = slice(bisect_left(starts, start),",
        "inside = slice(bisect_left(starts, start) + 1,",
    ),
    "only the first answer of a conversation is trained on": (
        f"{CORE}/chat.py",
        ONE,
        "    for start, end in spans:\n        inside",
        "    for start, end in spans[:1]:\n        inside",
    ),
    "the schedule steps twice": (
        f"{CORE}/model.py",
        ONE,
        "self._accelerator.optimizer_step_was_skipped:\n            self._schedule.step()",
        "self._accelerator.optimizer_step_was_skipped:\n            self._schedule.step()"
        "\n            self._schedule.step()",
    ),
    "a resumed run begins one step early": (
        "recipes/llama.py",
        f"{STOPS} SIGKILL-in-a-step",
        "first_step=run.step, lines",
        "first_step=max(run.step - 1, 0), lines",
    ),
    "the state of the optimizer is not restored": (
        f"{CORE}/checkpoint.py",
        f"{STOPS} SIGKILL-in-a-step",
        "    for box in boxes:\n        tensor = saved[box.name]\n",
        "    for box in boxes:\n"
        "        if box.name.startswith('state.'):\n"
        "            continue\n"
        "        tensor = saved[box.name]\n",
    ),
    "the best model is not loaded at the end": (
        f"{CORE}/run.py",
        ONE,
        '        if best["step"] == self.step:\n            return',
        "        if best:\n            return",
    ),
    "half of the adapters are not saved": (
        f"{CORE}/export.py",
        "test_cells.py -k single-llama-LoRA",
        "if weight.requires_grad}",
        "if weight.requires_grad and 'lora_B' not in name}",
    ),
    "the model is loaded in bf16 without fp32 masters": (
        f"{CORE}/weights.py",
        "test_cells.py -k 'ddp-llama-full-bf16'",
        "if zero and mixed_dtype(accelerator) and not is_quantized",
        "if mixed_dtype(accelerator) and not is_quantized",
    ),
    "the masters of ZeRO are rounded in a checkpoint": (
        f"{CORE}/zero.py",
        f"{CHAINS} 'own_yaml and zero2'",
        "yield from boxes_of(whole_name, held[: part.length], part)",
        "yield from boxes_of(whole_name, held[: part.length].bfloat16().float(), part)",
    ),
    "a shard is saved as one box where ranks have rows in turn": (
        f"{CORE}/boxes.py",
        f"{CHAINS} experts",
        "ends = (numbers.diff() != 1)",
        "ends = (numbers.diff() < 1)",
    ),
    "the last window of an epoch is dropped": (
        BATCHES,
        ONE,
        "return math.ceil(self.num_lines / self.rows_per_step)",
        "return math.floor(self.num_lines / self.rows_per_step)",
    ),
    "gradients are clipped after the step": (
        "recipes/llama.py",
        "test_judges.py",
        "                if accelerator.sync_gradients:\n                    max_norm",
        "                optimizer.step()\n                if accelerator.sync_gradients:\n"
        "                    max_norm",
        "                optimizer.step()\n                schedule.step()",
        "                schedule.step()",
    ),
    "nothing is flushed": (
        f"{CORE}/checkpoint.py",
        f"{STOPS} flushed",
        "        os.fsync(descriptor)",
        "        pass",
    ),
    "a checkpoint is renamed before it is flushed": (
        f"{CORE}/checkpoint.py",
        f"{STOPS} flushed",
        "    for path in (staging / BOXES, staging / PROGRESS, staging / MANIFEST, staging):\n"
        "        flush(path)\n",
        "",
        "    staging.rename(final)\n",
        "    staging.rename(final)\n"
        "    for path in (final / BOXES, final / PROGRESS, final / MANIFEST, final):\n"
        "        flush(path)\n",
    ),
    "rotation deletes the newest": (
        f"{CORE}/checkpoint.py",
        ONE,
        "for step in ours[limit:]:",
        "for step in ours[:-limit]:",
    ),
    "a stop ends with another code": (
        f"{CORE}/run.py",
        f"{STOPS} SIGTERM-in-a-step",
        "            Exit.STOPPED,\n",
        "            Exit.FAILED,\n",
    ),
    "a misspelt key of a YAML is accepted": (
        f"{CORE}/config_names.py",
        "../launch/test_refusals.py -k run_something_else",
        "elif key.name not in names and",
        "elif False and",
    ),
    "evaluations have dropout": (
        f"{CORE}/loss.py",
        "test_cells.py -k single-llama-dropout",
        "    model.eval()\n",
        "    model.train()\n",
    ),
    "an evaluation is the mean of its batches' means": (
        f"{CORE}/loss.py",
        "test_judges.py",
        'torch.stack([token_loss(model, part), batch["counts"][0]])',
        'torch.stack([token_loss(model, part) / batch["counts"][0], torch.ones(())])',
    ),
    "the tokens seen are not restored": (
        f"{CORE}/run.py",
        f"{STOPS} SIGKILL-in-a-step",
        "        self._num_seen = progress[self._counted]\n",
        "",
    ),
    "every epoch has the same order": (
        BATCHES,
        f"{GOLDEN} batch",
        "default_rng((self.args.seed, epoch))",
        "default_rng((self.args.seed, 0))",
    ),
    "norms decay": (
        f"{CORE}/model.py",
        "test_judges.py",
        'is_kept = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")',
        "is_kept = False",
    ),
    "every rank draws the same dropout": (
        f"{CORE}/run.py",
        "test_cells.py -k ddp-llama-dropout",
        "(self._args.seed, step, self._layout.token_rank)",
        "(self._args.seed, step, 0)",
    ),
    "metrics are not cut at a resume": (
        f"{CORE}/run.py",
        f"{STOPS} SIGKILL-in-a-step",
        "                cut_after(self._folder / name, self.step, self._evaluated)",
        "                pass",
    ),
    "--config=FILE is ignored": (
        f"{CORE}/cli.py",
        "../unit/core/test_cli.py -k overrides_them",
        "found, others = finder.parse_known_args(words)",
        "found, others = finder.parse_known_args([word for word in words if '--config=' not in "
        "word])",
    ),
    "a state whose shape shrank is read": (
        f"{CORE}/checkpoint.py",
        "../unit/core/test_state.py -k another_shape",
        "if list(box.shape) != list(tensor.shape):",
        "if False:",
    ),
    "state is asked for where no gradient had reached a weight": (
        f"{CORE}/state.py",
        "test_kept_or_refused.py -k gradient",
        "if nothing or not any(name in saved for name in own):",
        "if nothing:",
    ),
    "the loss scale of fp16 is not saved": (
        f"{CORE}/state.py",
        "../unit/core/test_state.py -k accelerates_scaler",
        "        return accelerator.scaler.state_dict()",
        "        return {}",
    ),
    "the numbers in an optimizer's groups are not restored": (
        f"{CORE}/state.py",
        "test_template.py -k edits",
        "        group.update(values)",
        "        pass",
    ),
    "what a disk does not give now is taken for damage": (
        f"{CORE}/checkpoint.py",
        "../unit/core/test_checkpoint.py -k no_damage",
        "except (FileNotFoundError, IsADirectoryError):",
        "except OSError:",
    ),
    "the share of an empty data set is taken from another one": (
        f"{CORE}/data.py",
        "test_kept_or_refused.py -k mixture",
        'fail(Exit.DATA, f"{source.name}: --eval_split leaves none of its rows to train on")',
        "own = np.flatnonzero(source_of_row >= 0)",
    ),
    "rows are not prepared again after an edit of one's own module": (
        f"{CORE}/data.py",
        "../launch/test_fingerprints.py -k edit",
        'hashed.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())',
        "hashed.update(file.name.encode())",
    ),
    "an answer that is the text [] counts as none": (
        f"{CORE}/chat.py",
        f"{GOLDEN} trained_on",
        'message["content"] = read_content(content, name)',
        'message["content"] = "" if is_empty(content) else read_content(content, name)',
    ),
    "a run none of whose checkpoints is whole starts over": (
        f"{CORE}/run.py",
        "../unit/core/test_run.py -k start_over",
        "if damaged and self._checkpoint is None:",
        "if False:",
    ),
    "of two layouts the first one counts": (
        f"{CORE}/engine.py",
        "../launch/test_refusals.py -k tp-mixtral",
        "if len(found) > 1:",
        "if False:",
    ),
    "packed lines are sorted by the lengths of rows": (
        "recipes/llama.py",
        "../unit/core/test_cli.py -k contradict",
        'if self.packing and self.train_sampling_strategy == "group_by_length":',
        "if False:",
    ),
    "a process that prepares rows is timed": (
        f"{CORE}/stop.py",
        "test_cells.py -k ddp_timeout",
        "        for number in SIGNALS:\n",
        "        self.show_life()\n        for number in SIGNALS:\n",
        'if int(os.environ.get("WORLD_SIZE", 1)) > 1:',
        "if True:",
        "self._seconds + more_seconds",
        "self._seconds / 5",
    ),
    "no rank waits for the last upload": (
        f"{CORE}/run.py",
        "../launch/test_extras.py -k upload",
        "on_rank_0(lambda: [extra.ended(is_done) for extra in self._extras], self._group)",
        "[extra.ended(is_done) for extra in self._extras if RANK == 0]",
    ),
    "a refusal prints nothing": (
        f"{CORE}/exits.py",
        "../unit/core/test_cli.py -k contradict",
        "    print(text, file=sys.stderr, flush=True)\n    report",
        "    report",
    ),
    "the result is not flushed before it takes its place": (
        f"{CORE}/export.py",
        f"{STOPS} flushed",
        "            flush(path)\n    except",
        "            pass\n    except",
    ),
    "state that only its own ranks could read is saved": (
        f"{CORE}/boxes.py",
        "test_kept_or_refused.py -k read_back",
        "shape not in (None, value.shape)",
        "False",
    ),
    # ---- Faults of ranks: of factors, of collectives, of rows that are shared ----
    "the result has only what rank 0 holds": (
        f"{CORE}/export.py",
        "test_cells.py -k fsdp2_full_shard-llama-full",
        "enumerate(gather(facts, group)):",
        "enumerate(gather(facts, group)[:1]):",
    ),
    "a save in the background holds what later steps change": (
        f"{CORE}/checkpoint.py",
        "test_saves.py -k beside",
        "copies = [copied(box) for box in own]",
        "copies = own",
    ),
    "NO_SHARD is full shard": (
        "accelerate_configs/fsdp1_no_shard.yaml",
        "../unit/test_shipped_yamls.py",
        "fsdp_sharding_strategy: NO_SHARD",
        "fsdp_reshard_after_forward: NO_SHARD",
    ),
    "positions of packed rows run on": (
        BATCHES,
        "test_cells.py -k packing",
        'inputs["position_ids"] = torch.from_numpy(positions)',
        'inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)',
    ),
    "the optimizer does not know half of the adapters": (
        f"{CORE}/model.py",
        "test_cells.py -k single-llama-LoRA",
        "if not weight.requires_grad:",
        'if not weight.requires_grad or "lora_B" in name:',
    ),
    "a loss is the mean of its micro-batches' means": (
        "recipes/llama.py",
        ONE,
        "token_loss(model, part) / num_trained_on",
        'token_loss(model, part) / (batch["counts"][0] * args.gradient_accumulation_steps'
        " * accelerator.num_processes)",
    ),
    "the schedule steps once for each process": (
        f"{CORE}/model.py",
        "test_cells.py -k ddp-llama-full",
        "optimizer_step_was_skipped:\n            self._schedule.step()",
        "optimizer_step_was_skipped:\n"
        "            for _ in range(self._accelerator.num_processes): self._schedule.step()",
    ),
    "a factor of the world size is missing": (
        "recipes/core/engine.py",
        "test_cells.py -k ddp-llama-full",
        "layout.gradient_divisor",
        "1",
    ),
    "DDP leaves out half of the adapters": (
        f"{CORE}/model.py",
        "test_cells.py -k ddp-llama-LoRA",
        "    workarounds.cast_for_zero3(model, accelerator)\n",
        "    workarounds.cast_for_zero3(model, accelerator)\n"
        "    model._ddp_params_and_buffers_to_ignore = "
        "[name for name, _ in model.named_parameters() if 'lora_B' in name]\n",
    ),
    "experts are averaged over the ranks with copies of them": (
        "recipes/extras/experts/layout.py",
        "test_cells.py -k ep-mixtral",
        "num_ranks = torch.distributed.get_world_size()",
        "num_ranks = copies.size()",
    ),
    "tokens count once for each rank that shares their row": (
        "recipes/extras/mesh/layout.py",
        "test_cells.py -k deepspeed_ulysses",
        "divided(self.accelerator.reduce(value), self.copies)",
        "self.accelerator.reduce(value)",
    ),
    "parts of rows all begin at position 0": (
        "recipes/extras/mesh/layout.py",
        "test_cells.py -k deepspeed_ulysses",
        'batch["inputs"] | part["inputs"] | {"position_ids": positions}',
        '{"input_ids": cut(ids)}',
    ),
    "an evaluation under sequence parallelism is of parts of rows": (
        "recipes/extras/mesh/layout.py",
        "test_cells.py -k deepspeed_ulysses",
        "return self.cp * (self.sp if is_training else 1)",
        "return self.cp * self.sp",
    ),
    "ranks that share matrices draw dropout of their own": (
        f"{CORE}/run.py",
        "test_cells.py -k 'tp-llama-dropout'",
        "(self._args.seed, step, self._layout.token_rank)",
        "(self._args.seed, step, RANK)",
    ),
}


def edits_of(name):
    """The pairs of texts of a fault."""
    _, _, *texts = FAULTS[name]
    return list(zip(texts[::2], texts[1::2], strict=True))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A worktree of this commit."""
    root = tmp_path_factory.mktemp("planted") / "tree"
    git = ["git", "-C", REPO, "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", root, "HEAD"], check=True)
    yield root
    subprocess.run([*git, "remove", "--force", root], check=True)


@pytest.mark.parametrize("name", FAULTS)
def test_is_caught(name, tree, record):
    file, test, *_ = FAULTS[name]
    path = tree / file
    text = path.read_text()
    changed = text
    for before, after in edits_of(name):
        assert text.count(before) == 1, before
        changed = changed.replace(before, after)
    path.write_text(changed)
    try:
        done = run_test(test, tree)
    finally:
        path.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.returncode == 1 and failed, done.stdout[-2000:] + done.stderr[-2000:]
    record(caught_by=failed[0].removeprefix("FAILED ").partition(" - ")[0].partition("tests/")[2])


def run_test(test, tree):
    """Run a test until its first failure, on the launches of a worktree."""
    file, _, words = test.partition(" -k ")
    # What is imported in process comes from the worktree, whose tests these then are
    root = tree if file.startswith("..") else REPO
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
    command.append(root / "tests" / "launch" / file)
    if words:
        command += ["-k", words.strip("'")]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = own | {"NET_ROOT": str(tree)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
