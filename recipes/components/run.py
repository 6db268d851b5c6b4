# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: it can be stopped, killed or run out of disk space, and resumes where it was.

A recipe's loop uses one object, `Run`. Behind it are core/stop.py (how a run ends), core/
checkpoint.py (files), core/state.py (boxes of whole tensors), core/nonfinite.py and metrics.py.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file, save_file

from components import folder, resuming
from components.best import BestEvaluation, is_better, metric_name
from components.changes import find_changes
from components.folder_lock import FolderLock
from components.long_calls import call_on_rank_0
from components.metrics import Metrics, drop_lines_after, finite_or_none, peak_memory_gib
from components.resuming import require_on_every_host, verify_candidates, verify_together
from components.trackers import start_trackers
from components.write_errors import WriteError
from core import checkpoint, nonfinite, workarounds
from core.arguments import CommonArguments, EvalOnStartArguments
from core.checkpoint import Checkpoints, NotFiniteError, SavedTensor
from core.engine import Layout, zero_stage
from core.exits import RANK, End, Exit, end_alone, end_together, fail, print_without_failing
from core.extras import parts_of_run
from core.model import Schedule
from core.state import (
    State,
    changed_group_values,
    get_loss_scale,
    group_values,
    restore_loss_scale,
    state_of,
)
from core.stop import Status, Watch, explain, write_whole
from core.summary import summary_lines, write_run_json
from core.weights import fingerprint_of_weights, note_left_out

T = TypeVar("T")
Problem = tuple[Exit, str]  # the code with which the run has to end, and why
# The names of the counts in metrics.jsonl and in checkpoints
COUNTED = {"tokens": "num_input_tokens_seen", "images": "num_images_seen"}
LISTED_BY_ALL = 2**20  # rows up to which every version of the recipes shuffled alike
ANEW = (
    "For a new run pass another --output_dir, or --resume_from_checkpoint none to replace the "
    "model."
)


class Stateful(Protocol):
    """An object of a recipe's own whose state, as JSON, is part of the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Run:
    """One training run in --output_dir, under any strategy. Every rank makes every call.

    Before the loop: start, check_plan, summarize, compute_once, resume, owes_evaluation. In the
    loop: steps, skip_if_not_finite, finish_step, save_and_end. In an evaluation: interruptible,
    log_evaluation. At the end: finish.

    Attributes:
        step: the number of steps done so far, those before the checkpoint included.
    """

    def __init__(self, args: CommonArguments, counts: str = "tokens", shows: str = "") -> None:
        """Handle signals, and from now on record in status.json how the run ends.

        Ends with 73 if the path of --output_dir cannot be followed, and with 64 if the run would
        overwrite its rows or a model that is not a run's, or read its own files as rows.

        Args:
            counts: what `finish_step` counts, "tokens" or "images".
            shows: a metric of `finish_step` that the progress bar shows beside the loss.
        """
        print_without_failing()
        folder.check_output_dir(args.output_dir)
        folder.check_overwrites_nothing(args)
        self._args = args
        self._folder = Path(args.output_dir)
        self._lock = FolderLock(self._folder)
        self._other_run = self._lock_folder()
        leaves_no_trace = args.dry_run or self._other_run is not None
        try:
            self._extras = parts_of_run(args)
        except ValueError as error:
            fail(Exit.USAGE, str(error))
        self._status = Status(None if leaves_no_trace else self._folder)
        self._watch = Watch(args.ddp_timeout, self._status)
        if RANK == 0 and not self._has_finished():
            self._status.write("starting")
        self._kept_steps: set[int] = set()  # Checkpoints that the next one does not replace
        budget = args.nonfinite_budget if args.nonfinite == "skip" else 0
        self._nonfinite = nonfinite.NonFiniteSteps(self._folder / folder.NONFINITE_ROWS, budget)
        self._checkpoint: Path | None = None
        self._restored: dict[str, Any] = {}  # The progress in the checkpoint
        self._progress_before: dict[str, Any] = {}  # The progress one step earlier
        self._identity: dict[str, Any] = {}
        self._others: Mapping[str, Stateful] = {}
        self._total_steps = 0
        self._counted = COUNTED[counts]
        self._speed = f"{counts}_per_second"
        self._shown = ["loss", shows] if shows else ["loss"]
        self._num_seen: Any = 0  # A number, or a tensor that the device may still compute
        self._saved_step = 0
        self._saved_is_whole = True  # Whether the run can be continued from that checkpoint
        evaluates_first = isinstance(args, EvalOnStartArguments) and args.eval_on_start
        self._evaluated = not evaluates_first
        self._best: BestEvaluation | None = None  # Only with --load_best_model_at_end
        self.step = 0

    # ---- Before the loop ----
    def start(self, layout: Layout) -> None:
        """Watch the other ranks, create the output folder, and find the newest checkpoint.

        Ends with 64, changing nothing, if another run is writing into the folder.
        """
        accelerator = layout.accelerator
        self._accelerator = accelerator
        self._layout = layout
        self._end_if_folder_is_taken()
        found = gather_object([folder.find_problem(self._folder, self._args.dry_run)])
        problems = [problem for problem in found if problem]
        if problems:
            raise End(Exit.CANNOT_WRITE, problems[0])
        self._other_run = self._lock_folder()
        self._end_if_folder_is_taken()
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

    def _lock_folder(self) -> str | None:
        """Lock the output folder, if it exists, on rank 0. Returns which other run has it."""
        is_writing = RANK == 0 and not self._args.dry_run
        return self._lock.take() if is_writing else None

    def _end_if_folder_is_taken(self) -> None:
        """End all ranks with 64 if another run has the folder. They do not change its status."""
        problem = broadcast_object_list([self._other_run])[0]
        if problem is not None:
            self._status.folder = None
            raise End(Exit.USAGE, problem)

    def check_plan(self, total_steps: int, num_lines: int, rows_per_step: int, data: str) -> None:
        """Compare this run's plan with the run that wrote the checkpoint.

        Ends with 64 if that run had other rows, batches or arguments, or adapters of another base,
        and with 0, writing nothing, if it is done and none of `total_steps` is left.

        Args:
            num_lines: what is shuffled as a whole: rows, packed lines, or a window of a stream.
            rows_per_step: rows of an optimizer step over all ranks.
            data: a hash of the training rows.
        """
        self._total_steps = total_steps
        self._identity = {"rows_per_step": rows_per_step, "data": data}
        if self._args.use_peft:  # The checkpoint has only the adapters.
            self._identity["base_weights"] = self._fingerprint_of_base()
        if self._checkpoint is None:
            return
        if self._restored.get("row_order", 1) > 1 and num_lines > LISTED_BY_ALL:
            raise End(
                Exit.USAGE,
                f"{self._checkpoint} is of recipes that shuffled {num_lines} rows in another way: "
                "continue with those, or choose another --output_dir",
            )
        changes = find_changes(
            self._args,
            self._restored["arguments"],
            self._identity,
            self._accelerator.num_processes,
        )
        for line in changes.lines:
            self._accelerator.print(f"changed since step {self.step}: {line}", flush=True)
        if changes.refusal:
            raise End(Exit.USAGE, changes.refusal)
        self._end_if_done()

    def _fingerprint_of_base(self) -> str | None:
        """Return the fingerprint of the base model's weights, as rank 0 sees them."""
        found = None
        if self._accelerator.is_main_process:
            args = self._args
            found = fingerprint_of_weights(args.model_name_or_path, args.model_revision)
        return broadcast_object_list([found])[0]

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
        resumed = self._checkpoint is not None
        start_trackers(accelerator, self._args, Path(sys.argv[0]).stem, resumed)
        if self._checkpoint is not None:
            self._restore(self._checkpoint)
        workarounds.settle_gradient_buckets(model)
        if accelerator.is_main_process:
            folder.remove_predictions_after(self._folder, self.step)
        self._metrics = Metrics(
            accelerator, self._args.output_dir, self._total_steps, first_step=self.step
        )
        self._num_seen_before = self._num_seen

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
        if self.step % self._args.logging_steps == 0 or self.step == self._total_steps:
            self._write_step(losses, grad_norm, epoch, more)
        self._metrics.step_is_done()

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
        part = ""
        if self._checkpoint is not None:
            part = f" since step {self._restored['step']}"
        self._accelerator.print(
            f"Trained in {seconds:.0f} s{part}; the model is in {self._folder}. {hint}",
            flush=True,
        )

    def _end_extras(self, is_done: bool) -> Problem | None:
        """Have the extras finish, on rank 0. Returns why a done run has failed nevertheless."""
        reasons = [extra.ended(is_done) for extra in self._extras]
        return next(((Exit.NO_HUB, reason) for reason in reasons if reason is not None), None)

    def _end_without_copy(self, code: Exit, why: str) -> End:
        """Return how a run ends that is done but whose result could not be uploaded."""
        end = End(code, f"the result is only in {self._folder}: {why}; the same command uploads it")
        if RANK == 0:
            self._status.write("done", end.code, end.why)
        return end

    # ---- Between steps ----
    def _between_steps(self) -> None:
        """Save if a checkpoint is due; if any rank was asked to stop, save and end."""
        args = self._args
        if self._any_rank_must_stop():
            self._save_and_stop()
        self._mark_as_running()
        is_last = self.step == self._total_steps
        due = args.save_steps > 0 and (self.step % args.save_steps == 0 or is_last)
        if self._best is not None and self._best.step == self.step:
            due = True
        if due or is_last or self.step % args.logging_steps == 0:
            self._check_nonfinite()
        progress = self._progress()
        if due:
            self._save_if_new(progress, only_model=args.save_only_model)
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
        self._mark_as_running()
        self._check_nonfinite()
        self._save_if_new(self._progress())
        self._end(
            Exit.STOPPED,
            f"Stopped and saved after step {self._saved_step} of {self._total_steps}: run the same "
            "command again to continue",
        )

    def _mark_as_running(self) -> None:
        """Record in status.json, once, that the run is past its start."""
        if self._watch.is_training:
            return
        self._watch.begin()
        if RANK == 0:
            self._status.write("running")

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

    def _write_step(
        self,
        losses: Sequence[torch.Tensor] | None,
        grad_norm: Any,
        epoch: float,
        more: Callable[[], Mapping[str, float]] | None,
    ) -> None:
        """Write the metrics of a step. Every rank takes part."""
        found = {}
        if losses is not None:
            found["loss"] = self._layout.sum_over_tokens(sum(losses)).item()
        if more is not None:
            found |= more()
        norm = float("nan") if grad_norm is None else float(grad_norm)
        num_seen = int(self._num_seen)
        seconds = time.perf_counter() - self._metrics.start
        self._metrics.write(
            {
                "step": self.step,
                "epoch": epoch,
                **{name: finite_or_none(value) for name, value in found.items()},
                "grad_norm": finite_or_none(norm),
                "learning_rate": self._schedule.learning_rate,
                self._counted: num_seen,
                self._speed: (num_seen - int(self._num_seen_before)) / seconds,
                "elapsed_seconds": seconds,
                "peak_memory_gib": peak_memory_gib(),
            },
            self.step,
        )
        self._metrics.show({name: f"{found[name]:.4f}" for name in self._shown})

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

    def _save_if_new(self, progress: dict[str, Any], only_model: bool = False) -> None:
        """Write a checkpoint, unless that step has one. Every rank takes part.

        A whole one replaces one that has only the model.

        Args:
            only_model: leave out the optimizer state; the run cannot be resumed from that.
        """
        has_one = progress["step"] <= self._saved_step and (only_model or self._saved_is_whole)
        # Before the first update there is no optimizer state.
        if not has_one and progress["schedule_steps"] > 0:
            self._save(progress, only_model)

    def _save(self, progress: dict[str, Any], only_model: bool) -> None:
        """Write a checkpoint. With --async_save it is still being written on return.

        Every rank takes part. All of them end with 73 if it, or the one before it, cannot be
        written, and with 70 if a weight is not finite.
        """
        self._finish_save()  # Before there is a second copy of the state
        accelerator = self._accelerator
        optimizer: Any = self._optimizer.optimizer
        state = state_of(self._model, optimizer)
        boxes = [box for box in state.boxes if not (only_model and is_of_optimizer(box.name))]
        now = group_values(optimizer)
        progress = progress | {
            "only_model": only_model,
            self._counted: int(progress[self._counted]),
            "arguments": vars(self._args) | self._identity,
            "loss_scale": get_loss_scale(accelerator, optimizer),
            "optimizer_groups": changed_group_values(self._group_values, now),
            "ranks": accelerator.num_processes,
            "strategy": self._layout.strategy,
        }
        self._kept_steps = {self._best.step} if self._best else set()
        try:
            self._checkpoints.begin(boxes, progress)
        except NotFiniteError as error:
            self._end(Exit.NOT_FINITE, str(error))
        except OSError as error:
            self._end(*self._describe_failed_save(error))
        self._saved_step = progress["step"]
        self._saved_is_whole = not only_model
        if not self._args.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait until the checkpoint under way is whole. Every rank takes part.

        All ranks end with 73 if it cannot be written.
        """
        problem = self._wait_for_save()
        if problem is not None:
            self._end(*problem)

    def _wait_for_save(self) -> Problem | None:
        """Wait for the checkpoint under way; return on every rank why it could not be finished."""
        if self._checkpoints.is_idle:
            return None
        # It may take longer than --ddp_timeout, but no disk that answers takes longer than this
        self._watch.show_life(more_seconds=self._checkpoints.seconds_at_most)
        try:
            self._checkpoints.finish()
        except OSError as error:
            return self._describe_failed_save(error)
        self._watch.show_life()
        return None

    def _describe_failed_save(self, error: OSError) -> Problem:
        """Return how a run ends whose checkpoint cannot be written."""
        needed = self._checkpoints.nbytes
        return Exit.CANNOT_WRITE, (
            f"the checkpoint after step {self._checkpoints.step} could not be finished: "
            f"{WriteError.of(error).describe(self._folder, needed)}; older checkpoints, if there "
            "are any, were not touched"
        )

    def _checkpoint_is_whole(self, path: Path) -> set[int]:
        """Name a new checkpoint as the latest, and hand it to the extras. Rank 0 calls it.

        Returns:
            The steps of others that are to be kept, however old they are.
        """
        write_whole(self._folder / folder.LATEST, path.name)
        return self._kept_steps.union(*[extra.saved(path) for extra in self._extras])

    def _find_checkpoint(self) -> None:
        """Choose the checkpoint to resume from, on rank 0 for all. Every host must see it.

        Each rank verifies the files that it will read.
        """
        accelerator = self._accelerator
        wish = self._args.resume_from_checkpoint
        of_this_run = (self._folder, wish, self._args.dry_run)
        problem = call_on_rank_0(accelerator, self._prepare_extras)
        if problem is not None:
            raise End(*problem)
        candidates = call_on_rank_0(accelerator, partial(resuming.find_candidates, *of_this_run))
        damages = verify_candidates(accelerator, candidates)
        found = call_on_rank_0(
            accelerator, partial(resuming.choose_checkpoint, *of_this_run, damages)
        )
        if found is None:
            self._keep_finished_model()
            return
        require_on_every_host(accelerator, found)  # It may have been fetched
        self._restored = checkpoint.read_progress(found)
        if self._restored.get("only_model"):
            self._keep_finished_model()
            raise End(
                Exit.USAGE,
                f"{found} has no optimizer state (--save_only_model), so the run cannot be "
                f"continued: choose another --output_dir, or move {found.parent} away",
            )
        self._checkpoint = found
        self.step = self._restored["step"]
        self._saved_step = self.step
        self._evaluated = self._restored["evaluated"]
        self._num_seen = self._restored[self._counted]
        self._nonfinite.left_out = self._restored["nonfinite_steps"]
        self._status.step = self.step
        self._find_best()

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

    def _keep_finished_model(self) -> None:
        """End all ranks if the run is done but has no checkpoint left, since it would start over.

        The exit code is 0 if this call is the same as that run's, and 64 if it is another.
        """
        args = self._args
        difference = None
        if self._accelerator.is_main_process and args.resume_from_checkpoint == "auto":
            if self._has_finished():
                difference = folder.difference_from_finished_run(self._folder, vars(args))
        difference = broadcast_object_list([difference])[0]
        if difference is None:
            return
        if difference:
            raise End(
                Exit.USAGE,
                f"the finished run in {self._folder} {difference}, and no checkpoint is left to "
                f"continue from. {ANEW}",
            )
        raise End(
            Exit.DONE,
            f"Nothing is left to do: the run is done, and the model is in {self._folder}. {ANEW}",
        )

    def _has_finished(self) -> bool:
        """Return whether the run in the folder is done and has left its result."""
        is_done = self._status.read().get("state") == "done"
        return is_done and not self._args.dry_run and folder.has_result(self._folder)

    def _end_if_done(self) -> None:
        """End with 0, writing nothing, if the run is done and no step is left."""
        is_main = self._accelerator.is_main_process
        done = broadcast_object_list([is_main and self._has_finished()])[0]
        if self.step < self._total_steps or not done:
            return
        name = length_argument(self._args)
        raise End(
            Exit.DONE,
            f"Nothing is left to do: all {self._total_steps} steps are done, and the model is in "
            f"{self._folder}. To train further, pass a larger --{name} and --allow_change {name}; "
            "for a new run, another --output_dir.",
        )

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
            for name in (folder.METRICS, folder.NONFINITE_ROWS):
                drop_lines_after(self._folder / name, self.step, self._evaluated)
        accelerator.print(
            f"Continuing from {path}, {describe_maker(progress)}",
            flush=True,
        )

    # ---- The best evaluation ----
    def _note_if_best(self, metrics: Mapping[str, float]) -> None:
        """Remember the evaluation after the current step if it is the best. Every rank takes part.

        Saves and ends with 64 if it has no such metric. The model before the first step is none to
        choose: it has no checkpoint.
        """
        name = metric_name(self._args)
        value = broadcast_object_list([metrics.get(name)])[0]  # The ranks must agree.
        if value is None:
            known = ", ".join(key for key in metrics if key.startswith("eval_"))
            message = (
                f"--metric_for_best_model {self._args.metric_for_best_model}: an evaluation has "
                f"{known}: choose one, with --allow_change metric_for_best_model to continue"
            )
            self._evaluated = False  # The resumed run evaluates again, by another metric.
            self.save_and_end(Exit.USAGE, message)
        if self._schedule.steps > 0 and is_better(value, self._best, self._args):
            self._best = BestEvaluation(self.step, name, value)

    def _find_best(self) -> None:
        """Take over the best evaluation before the checkpoint, if this folder has its model."""
        best = BestEvaluation.of_progress(self._restored, self._args)
        if best is None:
            return
        path = self._folder / f"checkpoint-{best.step}"
        is_there = broadcast_object_list([(path / checkpoint.MANIFEST).is_file()])[0]
        if is_there:
            self._best = best
            self._kept_steps = {best.step}
            return
        self._accelerator.print(
            f"The best evaluation so far was after step {best.step}, but {path} is not there: the "
            "best model is chosen from the evaluations that follow.",
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
        accelerator = self._accelerator
        self._metrics.say(
            f"Best evaluation: {best.metric} {best.value:.4f} after step {best.step}, whose model "
            "is saved"
        )
        if best.step == self.step:
            return
        path = self._folder / f"checkpoint-{best.step}"
        damage = verify_together(accelerator, path)
        if damage is not None:
            self._end(
                Exit.DATA,
                f"the model of the best evaluation cannot be trusted: {path}: {damage}; to save "
                "that of the last step, leave out --load_best_model_at_end and pass "
                "--allow_change load_best_model_at_end",
            )
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
        """Finish the checkpoint under way and end all ranks alike; the message is the last line.

        If that checkpoint cannot be written, they end with 73 instead.
        """
        self._metrics.close()
        problem = self._wait_for_save()
        if problem is not None:
            code, message = problem
        raise End(code, message)

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
        finish = partial(self._end_extras, end.code == Exit.DONE)
        problem = call_on_rank_0(self._accelerator, finish)
        if problem is not None:
            end = self._end_without_copy(*problem)
        workarounds.keep_group_until_exit()
        self._accelerator.end_training()
        end_together(end)


def is_of_optimizer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is of the optimizer's state."""
    return name.startswith("state.")


def describe_maker(progress: Mapping[str, Any]) -> str:
    """Return under which strategy, and on how many ranks, a checkpoint was made."""
    strategy = progress["strategy"]
    if strategy == "one process":
        return f"made with {strategy}"
    ranks = "1 rank" if progress["ranks"] == 1 else f"{progress['ranks']} ranks"
    return f"made with {strategy} on {ranks}"


def length_argument(args: CommonArguments) -> str:
    """Return the name of the argument that decides how long the run is."""
    if args.max_steps > 0:
        return "max_steps"
    if args.num_train_epochs is None:
        return "max_train_tokens"
    return "num_train_epochs"
