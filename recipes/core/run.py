# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: it can be stopped, killed or run out of disk space, and resumes where it was.

A recipe's loop uses one object, `Run`. Behind it are, in core/, stop.py (how a run ends),
checkpoint.py (files), state.py (boxes of whole tensors), nonfinite.py, metrics.py and summary.py.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from core import checkpoint, nonfinite, workarounds
from core.arguments import CommonArguments, EvalOnStartArguments
from core.checkpoint import (
    MANIFEST,
    Checkpoints,
    NotFiniteError,
    SavedTensor,
    checkpoints_in,
    gather,
)
from core.cli import may_change
from core.engine import Layout, zero_stage
from core.exits import RANK, End, Exit, end_alone, end_together, fail, print_without_failing
from core.export import has_result
from core.extras import parts_of_run
from core.metrics import METRICS, Metrics, cut_after, finite_or_none, peak_memory_gib
from core.model import Schedule
from core.state import (
    State,
    changed_group_values,
    get_loss_scale,
    group_values,
    restore_loss_scale,
    state_of,
)
from core.stop import Status, Watch, explain
from core.summary import RUN, summary_lines, write_run_json
from core.weights import fingerprint_of_weights, note_left_out

T = TypeVar("T")
Problem = tuple[Exit, str]  # the code with which the run has to end, and why
# The names of the counts in metrics.jsonl and in checkpoints
COUNTED = {"tokens": "num_input_tokens_seen", "images": "num_images_seen"}
NONFINITE_ROWS = "nonfinite_rows.jsonl"
# Files of a model or of adapters, in any form in which libraries have written them
MODEL_FILES = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
)
# What a run writes into its folder beside checkpoints
OWN_FILES = ("status.json", RUN, METRICS, NONFINITE_ROWS, "predictions*.jsonl", *MODEL_FILES)
# Rank 0 of a run whose launcher was killed still needs a moment to end
SECONDS_TO_END = 10
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, whose model --load_best_model_at_end saves at the end.

    Attributes:
        step: the number of steps done before it, which is also that of its checkpoint.
        metric: the name of what is compared, as in metrics.jsonl.
    """

    step: int
    metric: str
    value: float


class Stateful(Protocol):
    """An object of a recipe's own whose state, as JSON, is part of the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Run:
    """One training run in --output_dir, under any strategy. Every rank makes every call.

    Each call uses what the one before it has set, in this order: `start`, `check_plan`, `summarize`
    and `resume`; then `finish_step` once in each of `steps`; at the end `finish`.

    Attributes:
        step: the number of steps done so far, those before the checkpoint included.
    """

    def __init__(self, args: CommonArguments, counts: str = "tokens", shows: str = "") -> None:
        """Handle signals, and from now on record in status.json how the run ends.

        Ends with 73 if --output_dir cannot be written to, and with 64 if another run is writing
        there, or the run would overwrite its rows or a model that is not a run's.

        Args:
            counts: what `finish_step` counts, "tokens" or "images".
            shows: a metric of `finish_step` that the progress bar shows beside the loss.
        """
        print_without_failing()
        self._args = args
        self._folder = Path(args.output_dir)
        problem = find_overwritten(args)
        if problem is not None:
            fail(Exit.USAGE, f"--output_dir {args.output_dir}: {problem}")
        try:
            self._extras = parts_of_run(args)
        except ValueError as error:
            fail(Exit.USAGE, str(error))
        if RANK == 0 and not args.dry_run:
            self._lock = take_folder(self._folder)
        self._status = Status(None if args.dry_run else self._folder)
        self._watch = Watch(args.ddp_timeout, self._status)
        if RANK == 0 and not self._has_finished():
            self._status.write("starting")
        budget = args.nonfinite_budget if args.nonfinite == "skip" else 0
        self._nonfinite = nonfinite.NonFiniteSteps(self._folder / NONFINITE_ROWS, budget)
        self._checkpoint: Path | None = None
        self._restored: dict[str, Any] = {}  # The progress in the checkpoint
        self._progress_before: dict[str, Any] = {}  # The progress one step earlier
        self._counted = COUNTED[counts]
        self._speed = f"{counts}_per_second"
        self._shown = ["loss", shows] if shows else ["loss"]
        self._num_seen: Any = 0  # A number, or a tensor that the device may still compute
        self._saved_step = 0
        evaluates_first = isinstance(args, EvalOnStartArguments) and args.eval_on_start
        self._evaluated = not evaluates_first
        self._best: Best | None = None  # Only with --load_best_model_at_end
        self.step = 0

    # ---- Before the loop ----
    def start(self, layout: Layout) -> None:
        """Find the newest checkpoint."""
        accelerator = layout.accelerator
        self._accelerator = accelerator
        self._layout = layout
        self._group = checkpoint.make_patient_group()
        try:
            for extra in self._extras:
                extra.joined(accelerator, self._group, self._note_failure)
        except ValueError as error:
            raise End(Exit.USAGE, str(error)) from error
        self._checkpoints = Checkpoints(
            self._folder, self._args.save_total_limit, self._group, self._checkpoint_is_whole
        )
        self._find_checkpoint()

    def _note_failure(self, why: str) -> None:
        """Record a failure of this rank alone."""
        self._status.end(End(Exit.FAILED, why))

    def check_plan(
        self, total_steps: int, rows_per_step: int, train_rows: Any, eval_rows: Any = None
    ) -> None:
        """Compare this run's plan with the run that wrote the checkpoint, or the result.

        Ends with 64 if that run had other rows, batches or arguments, or adapters of another base,
        and with 0, writing nothing, if it is done and none of `total_steps` is left.

        Args:
            rows_per_step: rows of an optimizer step over all ranks.
            train_rows: whose `fingerprint` is that of the rows that are trained on.
            eval_rows: those that evaluations are made on, by which a best model is chosen.
        """
        args = self._args
        self._total_steps = total_steps
        self._identity: dict[str, Any] = {"rows_per_step": rows_per_step}
        self._identity["data"] = train_rows.fingerprint
        if args.load_best_model_at_end and eval_rows is not None:
            self._identity["eval_data"] = eval_rows.fingerprint
        if args.use_peft:  # The checkpoint has only the adapters
            look = partial(fingerprint_of_weights, args.model_name_or_path, args.model_revision)
            self._identity["base_weights"] = self._on_rank_0(look)
        is_done = self._on_rank_0(self._has_finished)
        may_differ = may_change(type(args))
        if self._checkpoint is not None:
            may_differ = {*may_differ, *args.allow_change} - {"rows_per_step"}
            self._refuse_changes(self._restored["arguments"], may_differ)
        elif is_done and args.resume_from_checkpoint == "auto":
            run = json.loads((self._folder / RUN).read_text())
            self._refuse_changes(run["arguments"] | run, may_differ)
        else:
            return
        if is_done and (self._checkpoint is None or self.step >= total_steps):
            raise End(
                Exit.DONE,
                f"Nothing is left to do: the run is done, and the model is in {self._folder}. For "
                "a new run pass another --output_dir, or --resume_from_checkpoint none to replace "
                "the model.",
            )

    def _refuse_changes(self, before: Mapping[str, Any], may_differ: Collection[str]) -> None:
        """Print what differs from the run in the folder, and end with 64 if that may not differ.

        Args:
            before: arguments and identity of that run.
            may_differ: names of what may.
        """
        now = json.loads(json.dumps(vars(self._args) | self._identity))
        refused = []
        for name, value in now.items():
            if value != before.get(name, value) and name != "allow_change":
                line = f"changed since step {self.step}: {name} {before[name]} -> {value}"
                self._accelerator.print(line, flush=True)
                if name not in may_differ:
                    refused.append(name)
        fix = (
            f"use those, --allow_change {' '.join(refused)} to continue from a checkpoint, or "
            "another --output_dir"
        )
        if "rows_per_step" in refused:
            fix = (
                "choose --per_device_train_batch_size and --gradient_accumulation_steps that give "
                f"a step its {before['rows_per_step']} rows"
            )
        if refused:
            raise End(
                Exit.USAGE,
                f"the run in {self._folder} had other values of {', '.join(refused)}, listed "
                f"above: {fix}",
            )

    def summarize(self, model: torch.nn.Module, notes: Mapping[str, str]) -> None:
        """Print what is really in force, and write run.json; --dry_run ends here.

        Args:
            notes: the recipe's lines of the summary: about rows, batches and the loss.
        """
        accelerator = self._accelerator
        notes = dict(notes)
        if accelerator.is_main_process and not self._args.use_peft:
            notes |= note_left_out(self._args, model)
        strategy = self._layout.strategy
        lines = summary_lines(accelerator, self._args, model, strategy, self._total_steps, notes)
        for name, text in lines.items():
            indented = text.replace("\n", "\n" + 13 * " ")
            accelerator.print(f"{name:>11}: {indented}", flush=True)
        if self._args.dry_run:
            raise End(Exit.DONE, "Dry run: nothing was trained or written.")
        if accelerator.is_main_process:
            write_run_json(self._args, lines, self._identity)

    def resume(
        self,
        model: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        schedule: Schedule,
        **others: Stateful,
    ) -> None:
        """Restore these from the checkpoint if there is one. Call it after `prepare`.

        Args:
            others: objects of the recipe's own, by the names of their states in the checkpoint.
        """
        accelerator = self._accelerator
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._others = others
        if zero_stage(accelerator) == 0:
            from core.zero import master_weights

            masters = master_weights(optimizer.optimizer).items()
            if masters:
                workarounds.undo_allocating_step(masters, optimizer.optimizer.optimizer)
        self._group_values = group_values(optimizer.optimizer)
        if self._checkpoint is not None:
            self._restore(self._checkpoint)
        workarounds.settle_gradient_buckets(model)
        self._metrics = Metrics(accelerator, self._args, self._total_steps, first_step=self.step)
        self._num_seen_before = self._num_seen
        if accelerator.is_main_process:
            for predictions in self._folder.glob("predictions-*.jsonl"):  # Of later steps
                if int(predictions.stem.partition("-")[2]) > self.step:
                    predictions.unlink()

    def owes_evaluation(self, evaluate_after: Collection[int]) -> bool:
        """Return whether the state that the loop begins with has to be evaluated and was not."""
        return self.step in evaluate_after and not self._evaluated

    def compute_once(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `compute` returned when this run called it first.

        The tensor is kept in OUTPUT_DIR/NAME.table, on the file system that all hosts share.
        """
        path = self._folder / f"{name}.table"
        if self._checkpoint is not None and path.is_file():
            return load_file(path)["table"].to(self._accelerator.device)
        table = compute()
        if self._accelerator.is_main_process:
            staged = path.with_suffix(".tmp")
            save_file({"table": table.cpu()}, staged)
            checkpoint.flush(staged)
            os.replace(staged, path)
        return table

    # ---- In the loop ----
    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left; the first step of a run is 1.

        The body of the loop has to call `finish_step` once in each. Between steps a checkpoint is
        written if one is due, and if any rank was asked to stop, the run is saved and ends with 75.
        Dropout is drawn from seed, step and rank, so that no random state has to be saved.
        """
        self._between_steps()
        while self.step < self._total_steps:
            self._seed_dropout(self.step + 1)
            yield self.step + 1
            self._between_steps()
        self._finish_save()
        # Reading the best model and writing the result may take long: from here on no sign of life
        # is expected.
        self._watch.rest()
        self._load_best()
        self._metrics.close()

    def skip_if_not_finite(
        self, grad_norm: Any, losses: Sequence[torch.Tensor], batches: Sequence[Mapping[str, Any]]
    ) -> None:
        """Have the next optimizer.step change nothing if the gradient is not finite.

        The rows of such a step are written to nonfinite_rows.jsonl; then --nonfinite decides.

        Args:
            grad_norm: what accelerator.clip_grad_norm_ returned.
            losses: this rank's parts of the loss, one for each micro-batch.
            batches: the micro-batches; their "row" has the numbers of their rows in the data.
        """
        norm = nonfinite.whole_norm(grad_norm)
        held_back = nonfinite.hold_back(self._accelerator, self._optimizer, norm)
        rows = [batch["row"] for batch in batches]
        step = nonfinite.UncheckedStep(self.step + 1, norm, held_back, rows, losses)
        self._nonfinite.note(step)
        if held_back or step.is_known_not_finite():
            self._schedule.hold()

    def finish_step(
        self,
        losses: Sequence[torch.Tensor] | None,
        grad_norm: Any,
        num_seen: torch.Tensor,
        epoch: float,
        more: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Count a step as done; every --logging_steps, and after the last, write its metrics.

        Only then does it wait for the device.

        Args:
            losses: this rank's parts of the loss, one for each micro-batch; None if `more` has it.
            num_seen: tokens or images of the step, over all ranks.
            epoch: passes over the data so far.
            more: a function that returns further metrics. Every rank calls it.
        """
        self.step += 1
        self._evaluated = False
        self._num_seen = self._num_seen + num_seen
        self._metrics.step_is_done()
        if self.step % self._args.logging_steps and self.step != self._total_steps:
            return
        found = {}
        if losses is not None:
            found["loss"] = self._layout.sum_over_tokens(sum(losses)).item()
        if more is not None:
            found |= more()
        norm = math.nan if grad_norm is None else float(grad_norm)
        num_seen_now = int(self._num_seen)
        seconds = time.perf_counter() - self._metrics.start
        line: dict[str, Any] = {"step": self.step, "epoch": epoch}
        line |= {name: finite_or_none(value) for name, value in found.items()}
        line["grad_norm"] = finite_or_none(norm)
        line["learning_rate"] = self._schedule.learning_rate
        line[self._counted] = num_seen_now
        line[self._speed] = (num_seen_now - int(self._num_seen_before)) / seconds
        line["elapsed_seconds"] = seconds
        line["peak_memory_gib"] = peak_memory_gib()
        self._metrics.write(line, self.step)
        self._metrics.show({name: f"{found[name]:.4f}" for name in self._shown})

    def log_evaluation(self, metrics: Mapping[str, float], text: str) -> None:
        """Write the evaluation after the current step, and print `text` above the progress bar."""
        self._metrics.write({"step": self.step, **metrics}, self.step)
        self._metrics.say(f"step {self.step}: {text}")
        self._evaluated = True
        if self._args.load_best_model_at_end:
            self._note_if_best(metrics)

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of an evaluation; if any rank has to stop meanwhile, save and end."""
        for item in items:
            yield item
            if self._any_rank_must_stop():
                self._evaluated = False
                self._save_and_stop()

    # ---- At the end ----
    def save_and_end(self, code: int, message: str) -> NoReturn:
        """Save the last step and end all ranks, since the next step cannot be trained."""
        self._check_nonfinite()
        self._save_if_new(self._progress())
        self._end(code, message)

    def finish(self, hint: str) -> None:
        """Record that the run is done, and print what to do next."""
        seconds = time.perf_counter() - self._metrics.start
        text = f"Trained in {seconds:.0f} s; the model is in {self._folder}. {hint}"
        self._accelerator.print(text, flush=True)

    # ---- Between steps ----
    def _between_steps(self) -> None:
        """Save if a checkpoint is due; if any rank was asked to stop, save and end."""
        args = self._args
        if self._any_rank_must_stop():
            self._save_and_stop()
        if not self._watch.is_training:
            self._watch.begin()
            if RANK == 0:
                self._status.write("running")
        is_last = self.step == self._total_steps
        due = args.save_steps > 0 and (self.step % args.save_steps == 0 or is_last)
        if self._best is not None and self._best.step == self.step:
            due = True
        if due or is_last or self.step % args.logging_steps == 0:
            self._check_nonfinite()
        progress = self._progress()
        if due:
            self._save_if_new(progress)
        self._status.step = min(self.step + 1, self._total_steps)
        self._progress_before = progress

    def _any_rank_must_stop(self) -> bool:
        """Return whether any rank was asked to stop. Every rank takes part.

        A checkpoint that is written in the background is taken further. All ranks end with 73 if it
        cannot be finished.
        """
        stops, ended = self._watch.vote(self._accelerator, int(self._checkpoints.has_ended))
        if ended == self._accelerator.num_processes:
            self._finish_save()
        return stops > 0

    def _save_and_stop(self) -> NoReturn:
        """Save the last step and end with 75."""
        self._check_nonfinite()
        self._save_if_new(self._progress())
        self._end(
            Exit.STOPPED,
            f"Stopped and saved after step {self._saved_step} of {self._total_steps}: run the same "
            "command again to continue",
        )

    def _seed_dropout(self, step: int) -> None:
        """Seed the generator of this rank's device for a step."""
        place = (self._args.seed, step, self._layout.token_rank)
        seed = int(np.random.SeedSequence(place).generate_state(1)[0])
        if self._accelerator.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def _check_nonfinite(self) -> None:
        """Save and end with 70 if a step was not finite and is not to be skipped."""
        stop = self._nonfinite.check(self._accelerator, self._group)
        if stop is None:
            return
        step, message = stop
        progress = self._progress()
        if step == self.step:  # The resumed run tries this step again.
            progress = self._progress_before | {"nonfinite_steps": self._nonfinite.left_out}
        self._save_if_new(progress)
        self._end(Exit.NOT_FINITE, message)

    # ---- Checkpoints ----
    def _progress(self) -> dict[str, Any]:
        """Return what a checkpoint records besides weights and optimizer state."""
        return {
            "step": self.step,
            "schedule_steps": self._schedule.steps,
            self._counted: self._num_seen,
            "nonfinite_steps": self._nonfinite.left_out,
            "evaluated": self._evaluated,
            "best": dataclasses.asdict(self._best) if self._best else None,
            **{name: other.state_dict() for name, other in self._others.items()},
        }

    def _save_if_new(self, progress: dict[str, Any]) -> None:
        """Write a checkpoint, unless that step has one. Every rank takes part.

        With --async_save it is still being written on return. All ranks end with 73 if it, or the
        one before it, cannot be written, and with 70 if a weight is not finite.
        """
        # Before the first update there is no optimizer state.
        if progress["step"] <= self._saved_step or progress["schedule_steps"] == 0:
            return
        self._finish_save()  # Before there is a second copy of the state
        accelerator = self._accelerator
        optimizer: Any = self._optimizer.optimizer
        now = group_values(optimizer)
        progress = progress | {
            self._counted: int(progress[self._counted]),
            "arguments": vars(self._args) | self._identity,
            "loss_scale": get_loss_scale(accelerator, optimizer),
            "optimizer_groups": changed_group_values(self._group_values, now),
            "ranks": accelerator.num_processes,
            "strategy": self._layout.strategy,
        }
        try:
            self._checkpoints.begin(state_of(self._model, optimizer).boxes, progress)
        except NotFiniteError as error:
            raise End(Exit.NOT_FINITE, str(error)) from error
        except OSError as error:
            raise self._failed_save(error) from error
        self._saved_step = progress["step"]
        if not self._args.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait until the checkpoint under way is whole. Every rank takes part.

        All ranks end with 73 if it cannot be written.
        """
        if self._checkpoints.is_idle:
            return
        # It may take longer than --ddp_timeout, but no disk that answers takes longer than this
        self._watch.show_life(more_seconds=self._checkpoints.seconds_at_most)
        try:
            self._checkpoints.finish()
        except OSError as error:
            raise self._failed_save(error) from error
        self._watch.show_life()

    def _failed_save(self, error: OSError) -> End:
        """Return how a run ends whose checkpoint cannot be written."""
        return End(
            Exit.CANNOT_WRITE,
            f"the checkpoint after step {self._checkpoints.step} could not be finished: {error}; "
            "older checkpoints, if there are any, were not touched",
        )

    def _checkpoint_is_whole(self, path: Path) -> set[int]:
        """Hand a new checkpoint to the extras. Rank 0 calls it.

        Returns:
            The steps of others that are to be kept, however old they are.
        """
        best = checkpoint.read_progress(path)["best"]
        kept = set() if best is None else {best["step"]}
        return kept.union(*[extra.saved(path) for extra in self._extras])

    def _find_checkpoint(self) -> None:
        """Choose the checkpoint to resume from. Each rank verifies some of the files.

        Ends with 65 if all are damaged, and with 64 if checkpoints of later steps would be lost. A
        file that cannot be read now is not damaged: its OSError ends the run and changes nothing.
        """
        wish = self._args.resume_from_checkpoint
        problem = self._on_rank_0(self._prepare_extras)
        if problem is not None:
            raise End(*problem)
        own, candidates = self._on_rank_0(self._list_checkpoints)
        damages = {}
        for path in candidates:
            damage = self._find_damage(path)
            if damage is None:
                self._checkpoint = path
                break
            self._accelerator.print(f"passed over {path}: {damage}", file=sys.stderr, flush=True)
            damages[path] = damage
        if damages and self._checkpoint is None:
            raise End(
                Exit.DATA,
                "no checkpoint can be trusted: choose another --output_dir to start over, or move "
                f"{min(damages)} away",
            )
        if self._checkpoint is not None:
            self._take_over(checkpoint.read_progress(self._checkpoint))
        for step, path in own.items():
            if wish != "auto" and step > self.step and path not in damages:
                raise End(
                    Exit.USAGE,
                    f"--resume_from_checkpoint {wish}: {path} is of a run that went further: "
                    "continue from that with auto, choose another --output_dir, or move it away",
                )
        if RANK == 0 and not self._args.dry_run:
            checkpoint.set_aside(damages)

    def _take_over(self, progress: dict[str, Any]) -> None:
        """Begin where a checkpoint was made."""
        self._restored = progress
        self.step = progress["step"]
        self._saved_step = self.step
        self._status.step = self.step
        self._evaluated = progress["evaluated"]
        self._num_seen = progress[self._counted]
        self._nonfinite.left_out = progress["nonfinite_steps"]
        self._find_best()

    def _on_rank_0(self, function: Callable[[], T]) -> T:
        """Return on every rank what a function returns on rank 0, however long that takes.

        Every rank takes part; the function must not communicate with other ranks.
        """
        found: Any = function() if self._accelerator.is_main_process else None
        return gather(found, self._group)[0]

    def _find_damage(self, path: Path) -> str | None:
        """Return why a checkpoint cannot be trusted, or None. Every rank looks at some files."""
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        damages = gather(checkpoint.find_damage(path, rank, num_ranks), self._group)
        return next((damage for damage in damages if damage is not None), None)

    def _list_checkpoints(self) -> tuple[dict[int, Path], list[Path]]:
        """Return {step: checkpoint} of the folder, and those to try, in order. Rank 0 calls it."""
        if not self._args.dry_run:
            for staging in self._folder.glob(f"checkpoint-*{checkpoint.STAGING}"):
                shutil.rmtree(staging, ignore_errors=True)  # A save was killed
        wish = self._args.resume_from_checkpoint
        return checkpoints_in(self._folder), checkpoint.candidates_in(self._folder, wish)

    def _prepare_extras(self) -> Problem | None:
        """Call the extras before a checkpoint is looked for, on rank 0. Returns what is wrong."""
        if self._args.dry_run:
            return None
        try:
            for extra in self._extras:
                extra.before_resume()
        except ValueError as error:
            return Exit.USAGE, str(error)
        except ConnectionError as error:
            return Exit.NO_HUB, str(error)
        return None

    def _has_finished(self) -> bool:
        """Return whether the run in the folder is done and has left its result."""
        is_done = self._status.read().get("state") == "done"
        return is_done and not self._args.dry_run and has_result(self._folder)

    def _restore(self, path: Path) -> None:
        """Restore the checkpoint's state, and cut the files with a line per step to its step."""
        accelerator = self._accelerator
        optimizer: Any = self._optimizer.optimizer
        saved = checkpoint.saved_tensors(path)
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        self._fill(state_of(self._model, optimizer, shapes), path, saved)
        progress = self._restored
        self._schedule.advance(progress["schedule_steps"])
        restore_loss_scale(accelerator, optimizer, progress.get("loss_scale", {}))
        values = progress.get("optimizer_groups", [])
        for group, changed in zip(optimizer.param_groups, values, strict=False):
            group.update(changed)
        for name, other in self._others.items():
            other.load_state_dict(progress[name])
        if accelerator.is_main_process:
            for name in (METRICS, NONFINITE_ROWS):
                cut_after(self._folder / name, self.step, self._evaluated)
        made = f"made with {progress['strategy']} on {progress['ranks']} ranks"
        accelerator.print(f"Continuing from {path}, {made}", flush=True)

    # ---- The best evaluation ----
    def _note_if_best(self, metrics: Mapping[str, float]) -> None:
        """Remember the evaluation after the current step if it is the best. Every rank takes part.

        Ends with 64 if it has no such metric. The model before the first step is none to choose: it
        has no checkpoint.
        """
        value = self._on_rank_0(partial(metrics.get, self._metric))  # The ranks must agree.
        if value is None:
            known = ", ".join(key for key in metrics if key.startswith("eval_"))
            flag = f"--metric_for_best_model {self._args.metric_for_best_model}"
            self._end(Exit.USAGE, f"{flag}: an evaluation has {known}: choose one")
        is_better = math.isfinite(value)
        if is_better and self._best is not None:
            is_better = value < self._best.value
            if is_greater_better(self._args):
                is_better = value > self._best.value
        if is_better and self._schedule.steps > 0:
            self._best = Best(self.step, self._metric, value)

    @property
    def _metric(self) -> str:
        """What the best model is chosen by, as metrics.jsonl has it."""
        return f"eval_{self._args.metric_for_best_model.removeprefix('eval_')}"

    def _find_best(self) -> None:
        """Take over the best evaluation before the checkpoint, if this folder has its model."""
        best = self._restored.get("best")
        if best is None or not self._args.load_best_model_at_end or best["metric"] != self._metric:
            return
        path = self._folder / f"checkpoint-{best['step']}"
        if self._on_rank_0((path / MANIFEST).is_file):
            self._best = Best(**best)
            return
        self._accelerator.print(
            f"The best evaluation so far was after step {best['step']}, but {path} is not there: "
            "the best model is chosen from the evaluations that follow.",
            flush=True,
        )

    def _load_best(self) -> None:
        """Put the weights of the best evaluation in place of the last. Every rank takes part."""
        best = self._best
        if not self._args.load_best_model_at_end:
            return
        if best is None:
            self._metrics.say("No evaluation can be chosen as the best: the last model is saved")
            return
        self._metrics.say(
            f"Best evaluation: {best.metric} {best.value:.4f} after step {best.step}, whose model "
            "is saved"
        )
        if best.step == self.step:
            return
        path = self._folder / f"checkpoint-{best.step}"
        damage = self._find_damage(path)
        if damage is not None:
            self._end(Exit.DATA, f"the model of the best evaluation, {path}: {damage}")
        # Training is over: the optimizer's state is that of the last step
        state = state_of(self._model, self._optimizer.optimizer)
        boxes = [box for box in state.boxes if not is_of_optimizer(box.name)]
        saved = {}
        for name, tensor in checkpoint.saved_tensors(path).items():
            if not is_of_optimizer(name):
                saved[name] = tensor
        self._fill(State(boxes, state.after_fill), path, saved)

    def _fill(self, state: State, path: Path, saved: dict[str, SavedTensor]) -> None:
        """Fill a state from a checkpoint; end with 65 if it is of another model."""
        try:
            checkpoint.fill(state, path, saved, self._group)
        except ValueError as error:
            raise End(Exit.DATA, f"{error}: it cannot be continued") from error

    # ---- Endings ----
    def _end(self, code: int, message: str) -> NoReturn:
        """Finish the checkpoint under way and end all ranks alike; the message is the last line."""
        self._metrics.close()
        self._finish_save()
        raise End(code, message)

    def _end_extras(self, is_done: bool) -> list[str]:
        """Have the extras finish, on rank 0. Returns why a done run has failed nevertheless."""
        reasons = [extra.ended(is_done) for extra in self._extras]
        return [reason for reason in reasons if reason is not None]

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        """Record how the run ends, finish what is uploaded and tracked, and end the process."""
        self._watch.rest()
        end = explain(error)
        is_first = self._status.end(end)
        if end.is_alone:
            end_alone(end, error, is_first)
            return
        is_done = end.code == Exit.DONE
        for reason in self._on_rank_0(partial(self._end_extras, is_done)):
            why = f"the result is only in {self._folder}: {reason}; the same command uploads it"
            end = End(Exit.NO_HUB, why)
            if RANK == 0:
                self._status.write("done", end.code, end.why)
        workarounds.keep_group_until_exit()
        self._accelerator.end_training()
        end_together(end)


def is_of_optimizer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is of the optimizer's state."""
    return name.startswith("state.")


def is_greater_better(args: CommonArguments) -> bool:
    """Return --greater_is_better, which by default follows from the metric's name."""
    if args.greater_is_better is not None:
        return args.greater_is_better
    return not args.metric_for_best_model.endswith(SMALLER_IS_BETTER)


def take_folder(folder: Path) -> FileLock:
    """Make the folder of a run, and keep other runs out of it for as long as this process lives."""
    lock = FileLock(folder / ".run.lock", timeout=SECONDS_TO_END)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        fail(
            Exit.USAGE,
            f"--output_dir {folder}: another run is writing there: wait until it has ended, or "
            "choose another",
        )
    except OSError as error:
        fail(Exit.CANNOT_WRITE, f"--output_dir {folder}: {error}")
    return lock


def find_overwritten(args: CommonArguments) -> str | None:
    """Return why a run would overwrite rows, the base model, or one that is not a run's, or None.

    Nothing is written into the folder of such rows or such a model, not even a status.
    """
    folder = Path(args.output_dir).resolve()
    if folder == Path(args.model_name_or_path).resolve():
        return "is the folder of --model_name_or_path, which the result would overwrite"
    names = [args.dataset_name] if isinstance(args.dataset_name, str) else [*args.dataset_name]
    if args.eval_dataset_name:
        names.append(args.eval_dataset_name)
    for name in names:
        path = Path(name).resolve()
        is_own = path.parent == folder and any(path.match(own) for own in OWN_FILES)
        is_around = path.is_dir() and folder.is_relative_to(path)
        if is_around or (is_own and path.exists()):
            return f"the run would overwrite the rows in {name}, or read its own files as rows"
    if (folder / RUN).is_file() or any(folder.glob(f"checkpoint-*/{MANIFEST}")):
        return None
    for pattern in MODEL_FILES:
        for path in folder.glob(pattern):
            return f"has {path.name} of a model that is not from a run of these recipes"
    return None
