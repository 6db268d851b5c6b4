# SPDX-License-Identifier: Apache-2.0
"""Plant known faults one at a time, and see which test of the net catches each.

    python evidence/planted_faults.py                    # all, about a quarter of an hour
    python evidence/planted_faults.py "best" "flush"     # those whose name has one of these words

The measure of a net is what it catches, not what it covers. Each fault is an edit of a line in a
worktree of this commit, which the tests of the net launch in place of this checkout (NET_ROOT of
tests/net.py; the golden subjects import it). It is caught if a test fails that passes without it.
results/planted_faults.json lists what caught each. Ends with 1 if one is not caught.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "results" / "planted_faults.json"
CORE = "recipes/core"
BATCHES = "recipes/core/batches.py"
ONE = "test_cells.py -k single-llama-full"
STOPS = "test_stops.py -k"
CHAINS = "test_chains.py -k"
GOLDEN = "../unit/test_golden.py -k"


@dataclass(frozen=True)
class Planted:
    """One fault: an edit of a file, or several, and the test that is to catch it.

    Attributes:
        before: a text that is in the file once; `after` takes its place.
        also: more such pairs.
        test: of tests/launch, with pytest's -k.
    """

    name: str
    file: str
    before: str
    after: str
    also: tuple[tuple[str, str], ...] = ()
    test: str = ONE

    @property
    def edits(self) -> list[tuple[str, str]]:
        """Every edit of the file."""
        return [(self.before, self.after), *self.also]


FAULTS = [
    Planted(
        "the loss is divided by all tokens",
        "recipes/llama.py",
        "num_trained_on, num_tokens = counts",
        "num_tokens, num_trained_on = counts",
        test="test_judges.py",
    ),
    Planted(
        "targets are shifted by one in the batch",
        BATCHES,
        "torch.from_numpy(trained_on - 1)",
        "torch.from_numpy(trained_on)",
    ),
    Planted(
        "labels are shifted by one in the row",
        f"{CORE}/chat.py",
        "inside = slice(bisect_left(starts, start),",
        "inside = slice(bisect_left(starts, start) + 1,",
        test=f"{GOLDEN} trained_on",
    ),
    Planted(
        "only the first answer of a conversation is trained on",
        f"{CORE}/chat.py",
        "    for start, end in spans:\n        inside",
        "    for start, end in spans[:1]:\n        inside",
    ),
    Planted(
        "the schedule steps twice",
        f"{CORE}/model.py",
        "self._accelerator.optimizer_step_was_skipped:\n            self._schedule.step()",
        "self._accelerator.optimizer_step_was_skipped:\n            self._schedule.step()"
        "\n            self._schedule.step()",
    ),
    Planted(
        "a resumed run begins one step early",
        "recipes/llama.py",
        "first_step=run.step, lines",
        "first_step=max(run.step - 1, 0), lines",
        test=f"{STOPS} SIGKILL-in-a-step",
    ),
    Planted(
        "the state of the optimizer is not restored",
        f"{CORE}/checkpoint.py",
        "    for box in boxes:\n        tensor = saved[box.name]\n",
        "    for box in boxes:\n"
        "        if box.name.startswith('state.'):\n"
        "            continue\n"
        "        tensor = saved[box.name]\n",
        test=f"{STOPS} SIGKILL-in-a-step",
    ),
    Planted(
        "the best model is not loaded at the end",
        f"{CORE}/run.py",
        '        if best["step"] == self.step:\n            return',
        "        if best:\n            return",
    ),
    Planted(
        "half of the adapters are not saved",
        f"{CORE}/export.py",
        "if weight.requires_grad}",
        "if weight.requires_grad and 'lora_B' not in name}",
        test="test_cells.py -k single-llama-LoRA",
    ),
    Planted(
        "the model is loaded in bf16 without fp32 masters",
        f"{CORE}/weights.py",
        "if zero and mixed_dtype(accelerator) and not is_quantized",
        "if mixed_dtype(accelerator) and not is_quantized",
        test="test_cells.py -k 'ddp-llama-full-bf16'",
    ),
    Planted(
        "the masters of ZeRO are rounded in a checkpoint",
        f"{CORE}/zero.py",
        "yield from boxes_of(whole_name, held[: part.length], part)",
        "yield from boxes_of(whole_name, held[: part.length].bfloat16().float(), part)",
        test=f"{CHAINS} 'own_yaml and zero2'",
    ),
    Planted(
        "a shard is saved as one box where ranks have rows in turn",
        f"{CORE}/boxes.py",
        "ends = (numbers.diff() != 1)",
        "ends = (numbers.diff() < 1)",
        test=f"{CHAINS} experts",
    ),
    Planted(
        "the last window of an epoch is dropped",
        BATCHES,
        "return math.ceil(self.num_lines / self.rows_per_step)",
        "return math.floor(self.num_lines / self.rows_per_step)",
    ),
    Planted(
        "gradients are clipped after the step",
        "recipes/llama.py",
        "                if accelerator.sync_gradients:\n                    max_norm",
        "                optimizer.step()\n                if accelerator.sync_gradients:\n"
        "                    max_norm",
        also=(
            (
                "                optimizer.step()\n                schedule.step()",
                "                schedule.step()",
            ),
        ),
        test="test_judges.py",
    ),
    Planted(
        "nothing is flushed",
        f"{CORE}/checkpoint.py",
        "        os.fsync(descriptor)",
        "        pass",
        test=f"{STOPS} flushed",
    ),
    Planted(
        "a checkpoint is renamed before it is flushed",
        f"{CORE}/checkpoint.py",
        "    for path in (staging / BOXES, staging / PROGRESS, staging / MANIFEST, staging):\n"
        "        flush(path)\n",
        "",
        also=(
            (
                "    staging.rename(final)\n",
                "    staging.rename(final)\n"
                "    for path in (final / BOXES, final / PROGRESS, final / MANIFEST, final):\n"
                "        flush(path)\n",
            ),
        ),
        test=f"{STOPS} flushed",
    ),
    Planted(
        "rotation deletes the newest",
        f"{CORE}/checkpoint.py",
        "for step in ours[limit:]:",
        "for step in ours[:-limit]:",
    ),
    Planted(
        "a stop ends with another code",
        f"{CORE}/run.py",
        "            Exit.STOPPED,\n",
        "            Exit.FAILED,\n",
        test=f"{STOPS} SIGTERM-in-a-step",
    ),
    Planted(
        "a misspelt key of a YAML is accepted",
        f"{CORE}/config_names.py",
        "elif key.name not in names and",
        "elif False and",
        test="../launch/test_refusals.py -k run_something_else",
    ),
    Planted(
        "evaluations have dropout",
        f"{CORE}/loss.py",
        "    model.eval()\n",
        "    model.train()\n",
        test="test_cells.py -k single-llama-dropout",
    ),
    Planted(
        "an evaluation is the mean of its batches' means",
        f"{CORE}/loss.py",
        'torch.stack([token_loss(model, part), batch["counts"][0]])',
        'torch.stack([token_loss(model, part) / batch["counts"][0], torch.ones(())])',
        test="test_judges.py",
    ),
    Planted(
        "the tokens seen are not restored",
        f"{CORE}/run.py",
        "        self._num_seen = progress[self._counted]\n",
        "",
        test=f"{STOPS} SIGKILL-in-a-step",
    ),
    Planted(
        "every epoch has the same order",
        BATCHES,
        "default_rng((self.args.seed, epoch))",
        "default_rng((self.args.seed, 0))",
        test=f"{GOLDEN} batch",
    ),
    Planted(
        "norms decay",
        f"{CORE}/model.py",
        'is_kept = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")',
        "is_kept = False",
        test="test_judges.py",
    ),
    Planted(
        "every rank draws the same dropout",
        f"{CORE}/run.py",
        "(self._args.seed, step, self._layout.token_rank)",
        "(self._args.seed, step, 0)",
        test="test_cells.py -k ddp-llama-dropout",
    ),
    Planted(
        "metrics are not cut at a resume",
        f"{CORE}/run.py",
        "                cut_after(self._folder / name, self.step, self._evaluated)",
        "                pass",
        test=f"{STOPS} SIGKILL-in-a-step",
    ),
    Planted(
        "--config=FILE is ignored",
        f"{CORE}/cli.py",
        "found, others = finder.parse_known_args(words)",
        "found, others = finder.parse_known_args([word for word in words if '--config=' not in "
        "word])",
        test="../unit/core/test_cli.py -k overrides_them",
    ),
    Planted(
        "a state whose shape shrank is read",
        f"{CORE}/checkpoint.py",
        "if list(box.shape) != list(tensor.shape):",
        "if False:",
        test="../unit/core/test_state.py -k another_shape",
    ),
    Planted(
        "state is asked for where no gradient had reached a weight",
        f"{CORE}/state.py",
        "if nothing or not any(name in saved for name in own):",
        "if nothing:",
        test="test_kept_or_refused.py -k gradient",
    ),
    Planted(
        "the loss scale of fp16 is not saved",
        f"{CORE}/state.py",
        "        return accelerator.scaler.state_dict()",
        "        return {}",
        test="../unit/core/test_state.py -k accelerates_scaler",
    ),
    Planted(
        "the numbers in an optimizer's groups are not restored",
        f"{CORE}/state.py",
        "        group.update(values)",
        "        pass",
        test="test_template.py -k edits",
    ),
    Planted(
        "what a disk does not give now is taken for damage",
        f"{CORE}/checkpoint.py",
        "except (FileNotFoundError, IsADirectoryError):",
        "except OSError:",
        test="../unit/core/test_checkpoint.py -k no_damage",
    ),
    Planted(
        "the share of an empty data set is taken from another one",
        f"{CORE}/data.py",
        'fail(Exit.DATA, f"{source.name}: --eval_split leaves none of its rows to train on")',
        "own = np.flatnonzero(source_of_row >= 0)",
        test="test_kept_or_refused.py -k mixture",
    ),
    Planted(
        "rows are not prepared again after an edit of one's own module",
        f"{CORE}/data.py",
        'hashed.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())',
        "hashed.update(file.name.encode())",
        test="../launch/test_fingerprints.py -k edit",
    ),
    Planted(
        "an answer that is the text [] counts as none",
        f"{CORE}/chat.py",
        'message["content"] = read_content(content, name)',
        'message["content"] = "" if is_empty(content) else read_content(content, name)',
        test=f"{GOLDEN} trained_on",
    ),
    Planted(
        "a run none of whose checkpoints is whole starts over",
        f"{CORE}/run.py",
        "if damaged and self._checkpoint is None:",
        "if False:",
        test="../unit/core/test_run.py -k start_over",
    ),
    Planted(
        "of two layouts the first one counts",
        f"{CORE}/engine.py",
        "if len(found) > 1:",
        "if False:",
        test="../launch/test_refusals.py -k tp-mixtral",
    ),
    Planted(
        "packed lines are sorted by the lengths of rows",
        "recipes/llama.py",
        'if self.packing and self.train_sampling_strategy == "group_by_length":',
        "if False:",
        test="../unit/core/test_cli.py -k contradict",
    ),
    Planted(
        "a process that prepares rows is timed",
        f"{CORE}/stop.py",
        "        for number in SIGNALS:\n",
        "        self.show_life()\n        for number in SIGNALS:\n",
        also=(
            ('if int(os.environ.get("WORLD_SIZE", 1)) > 1:', "if True:"),
            ("self._seconds + more_seconds", "self._seconds / 5"),
        ),
        test="test_cells.py -k ddp_timeout",
    ),
    Planted(
        "no rank waits for the last upload",
        f"{CORE}/run.py",
        "on_rank_0(lambda: [extra.ended(is_done) for extra in self._extras], self._group)",
        "[extra.ended(is_done) for extra in self._extras if RANK == 0]",
        test="../launch/test_extras.py -k upload",
    ),
    Planted(
        "a refusal prints nothing",
        f"{CORE}/exits.py",
        "    print(text, file=sys.stderr, flush=True)\n    report",
        "    report",
        test="../unit/core/test_cli.py -k contradict",
    ),
    Planted(
        "the result is not flushed before it takes its place",
        f"{CORE}/export.py",
        "            flush(path)\n    except",
        "            pass\n    except",
        test=f"{STOPS} flushed",
    ),
    Planted(
        "state that only its own ranks could read is saved",
        f"{CORE}/boxes.py",
        "shape not in (None, value.shape)",
        "False",
        test="test_kept_or_refused.py -k read_back",
    ),
    # ---- Faults of ranks: of factors, of collectives, of rows that are shared ----
    Planted(
        "the result has only what rank 0 holds",
        f"{CORE}/export.py",
        "enumerate(gather(facts, group)):",
        "enumerate(gather(facts, group)[:1]):",
        test="test_cells.py -k fsdp2_full_shard-llama-full",
    ),
    Planted(
        "a save in the background holds what later steps change",
        f"{CORE}/checkpoint.py",
        "copies = [copied(box) for box in own]",
        "copies = own",
        test="test_saves.py -k beside",
    ),
    Planted(
        "NO_SHARD is full shard",
        "accelerate_configs/fsdp1_no_shard.yaml",
        "fsdp_sharding_strategy: NO_SHARD",
        "fsdp_reshard_after_forward: NO_SHARD",
        test="../unit/test_shipped_yamls.py",
    ),
    Planted(
        "positions of packed rows run on",
        BATCHES,
        'inputs["position_ids"] = torch.from_numpy(positions)',
        'inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)',
        test="test_cells.py -k packing",
    ),
    Planted(
        "the optimizer does not know half of the adapters",
        f"{CORE}/model.py",
        "if not weight.requires_grad:",
        'if not weight.requires_grad or "lora_B" in name:',
        test="test_cells.py -k single-llama-LoRA",
    ),
    Planted(
        "a loss is the mean of its micro-batches' means",
        "recipes/llama.py",
        "token_loss(model, part) / num_trained_on",
        'token_loss(model, part) / (batch["counts"][0] * args.gradient_accumulation_steps'
        " * accelerator.num_processes)",
    ),
    Planted(
        "the schedule steps once for each process",
        f"{CORE}/model.py",
        "optimizer_step_was_skipped:\n            self._schedule.step()",
        "optimizer_step_was_skipped:\n"
        "            for _ in range(self._accelerator.num_processes): self._schedule.step()",
        test="test_cells.py -k ddp-llama-full",
    ),
    Planted(
        "a factor of the world size is missing",
        "recipes/core/engine.py",
        "layout.gradient_divisor",
        "1",
        test="test_cells.py -k ddp-llama-full",
    ),
    Planted(
        "DDP leaves out half of the adapters",
        f"{CORE}/model.py",
        "    workarounds.cast_for_zero3(model, accelerator)\n",
        "    workarounds.cast_for_zero3(model, accelerator)\n"
        "    model._ddp_params_and_buffers_to_ignore = "
        "[name for name, _ in model.named_parameters() if 'lora_B' in name]\n",
        test="test_cells.py -k ddp-llama-LoRA",
    ),
    Planted(
        "experts are averaged over the ranks with copies of them",
        "recipes/extras/experts/layout.py",
        "num_ranks = torch.distributed.get_world_size()",
        "num_ranks = copies.size()",
        test="test_cells.py -k ep-mixtral",
    ),
    Planted(
        "tokens count once for each rank that shares their row",
        "recipes/extras/mesh/layout.py",
        "divided(self.accelerator.reduce(value), self.copies)",
        "self.accelerator.reduce(value)",
        test="test_cells.py -k deepspeed_ulysses",
    ),
    Planted(
        "parts of rows all begin at position 0",
        "recipes/extras/mesh/layout.py",
        'batch["inputs"] | part["inputs"] | {"position_ids": positions}',
        '{"input_ids": cut(ids)}',
        test="test_cells.py -k deepspeed_ulysses",
    ),
    Planted(
        "an evaluation under sequence parallelism is of parts of rows",
        "recipes/extras/mesh/layout.py",
        "return self.cp * (self.sp if is_training else 1)",
        "return self.cp * self.sp",
        test="test_cells.py -k deepspeed_ulysses",
    ),
    Planted(
        "ranks that share matrices draw dropout of their own",
        f"{CORE}/run.py",
        "(self._args.seed, step, self._layout.token_rank)",
        "(self._args.seed, step, RANK)",
        test="test_cells.py -k 'tp-llama-dropout'",
    ),
]


def main() -> None:
    """Plant the faults that the words of the command choose."""
    wanted = sys.argv[1:]
    chosen = [one for one in FAULTS if not wanted or any(word in one.name for word in wanted)]
    caught = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder, "tree")
        git("worktree", "add", "--quiet", "--detach", root, "HEAD")
        try:
            for one in chosen:
                caught[one.name] = catch(one, root)
                print(f"{one.name}: {caught[one.name] or 'NOT CAUGHT'}", flush=True)
        finally:
            git("worktree", "remove", "--force", root)
    record(caught)
    sys.exit(not all(caught.values()))


def git(*words: str | Path) -> None:
    """Run git in this checkout."""
    subprocess.run(["git", "-C", REPO, *words], check=True)


def catch(one: Planted, root: Path) -> str | None:
    """Return the name of the first test that fails with the fault, or None."""
    path = root / one.file
    text = path.read_text()
    changed = text
    for before, after in one.edits:
        assert text.count(before) == 1, (
            f"{one.name}: {before!r} is there {text.count(before)} times"
        )
        changed = changed.replace(before, after)
    path.write_text(changed)
    try:
        return first_failure(one.test, root)
    finally:
        path.write_text(text)


def first_failure(test: str, root: Path) -> str | None:
    """Return the first test that fails on a checkout, or None."""
    file, _, words = test.partition(" -k ")
    # What is imported in process comes from the worktree, whose tests these then are
    tests = (root if file.startswith("..") else REPO) / "tests" / "launch"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", tests / file]
    if words:
        command += ["-k", words.strip("'")]
    environment = os.environ | {"NET_ROOT": str(root)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=root if file.startswith("..") else REPO,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode == 1 and lines:
        return lines[0].removeprefix("FAILED ").partition(" - ")[0].partition("tests/")[2]
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return None


def record(caught: dict[str, str | None]) -> None:
    """Write what caught each fault, beside those that did not run now."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = known | caught
    kept = {one.name: rows[one.name] for one in FAULTS if one.name in rows}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
