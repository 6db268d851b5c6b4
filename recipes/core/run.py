# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: it can be stopped, killed or run out of disk space, and resumes where it was.

A recipe's loop uses one object, `Run`. Behind it are, in core/, stop.py (how a run ends),
checkpoint.py (files), state.py (boxes of whole tensors), nonfinite.py, metrics.py and summary.py.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from filelock import FileLock, Timeout
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from core import checkpoint, workarounds
from core.arguments import CommonArguments
from core.batches import Plan
from core.checkpoint import Checkpoints, gather, on_rank_0
from core.cli import may_change
from core.engine import Layout, is_compiled, zero_stage
from core.exits import RANK, End, Exit, end_alone, end_together, fail, print_without_failing
from core.export import has_result
from core.extras import parts_of_run
from core.metrics import METRICS, Metrics, cut_after, finite_or_none, peak_flops, peak_memory_gib
from core.model import Schedule
from core.nonfinite import NonFiniteSteps, UncheckedStep, hold_back
from core.state import (
    changed_group_values,
    get_loss_scale,
    group_values,
    restore_group_values,
    restore_loss_scale,
    state_of,
)
from core.stop import Status, Watch, explain
from core.summary import RUN, flops_per_token, summary_lines, write_run_json
from core.weights import fingerprint_of_weights, note_left_out

T = TypeVar("T")
# The names of the counts in metrics.jsonl and in checkpoints
COUNTED = {"tokens": "num_input_tokens_seen", "images": "num_images_seen"}
NONFINITE_ROWS = "nonfinite_rows.jsonl"
SAMPLES = "samples.jsonl"  # answers of a recipe that learns from those of its model
# What a run writes into its folder beside a model and checkpoints
OWN_FILES = ("status.json", RUN, METRICS, NONFINITE_ROWS, SAMPLES, "predictions*.jsonl")
# Rank 0 of a run whose launcher was killed still needs a moment to end
SECONDS_TO_END = 10
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")


class Run:
    """One training run in --output_dir, under any strategy. Every rank makes every call.

    Each call uses what the one before it has set, in this order: `start`, `check_plan`, `summarize`
    and `resume`; then `finish_step` once in each of `steps`; at the end `finish`.

    Attributes:
        step: the number of steps done so far, those before the checkpoint included.
    """

    def __init__(self, args: CommonArguments, counts: str = "tokens") -> None:
        """Handle signals, and from now on record in status.json how the run ends.

        Ends with 73 if --output_dir cannot be written to, and with 64 if another run is writing
        there, or the result would overwrite a model that is not a run's.

        Args:
            counts: what `finish_step` counts, "tokens" or "images".
        """
        print_without_failing()
        self._args = args
        self._folder = Path(args.output_dir)
        problem = find_overwritten(args)
        if problem is not None:
            fail(Exit.USAGE, f"--output_dir {args.output_dir} {problem}: choose another")
        self._extras = parts_of_run(args)
        if RANK == 0 and not args.dry_run:
            self._lock = take_folder(self._folder)
        self._status = Status(None if args.dry_run else self._folder)
        self._watch = Watch(args.ddp_timeout, self._status)
        if RANK == 0 and not self._has_finished():
            self._status.write("starting")
        budget = args.nonfinite_budget if args.nonfinite == "skip" else 0
        self._nonfinite = NonFiniteSteps(self._folder / NONFINITE_ROWS, budget)
        self._checkpoint: Path | None = None
        self._restored: dict[str, Any] = {}  # The progress in the checkpoint
        self._progress_before: dict[str, Any] = {}  # The progress one step earlier
        self._counts = counts
        self._counted = COUNTED[counts]
        self._num_seen: Any = 0  # A number, or a tensor that the device may still compute
        self._share_of_peak: float | None = None  # that one token a second makes, if it is known
        self._graphs = 0  # compiled so far
        self._compiled_in = 0  # the step that compiled the last one
        self._saved_step = 0
        self._evaluated = False  # the state after the current step
        # Step, metric and value of the best evaluation; only with --load_best_model_at_end
        self._best: dict[str, Any] | None = None
        self._metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        self.step = 0

    # ---- Before the loop ----
    def start(self, layout: Layout) -> None:
        """Find the newest checkpoint."""
        accelerator = layout.accelerator
        self._accelerator = accelerator
        self._layout = layout
        self._group = checkpoint.make_patient_group()
        for extra in self._extras:
            extra.joined(accelerator, self._group, self._status)
        self._checkpoints = Checkpoints(
            self._folder, self._args.save_total_limit, self._group, self._checkpoint_is_whole
        )
        self._find_checkpoint()

    def check_plan(self, plan: Plan, train_rows: Any, eval_rows: Any = None) -> None:
        """Compare this run's plan with the run that wrote the checkpoint, or the result.

        Ends with 64 if that run had other rows, batches or arguments, or adapters of another base,
        or a best model has to be chosen without rows to evaluate on; and with 0, writing nothing,
        if that run is done and no step of the plan is left.
        """
        args = self._args
        self._lengths = plan.lengths
        self._total_steps = plan.total_steps
        self._identity: dict[str, Any] = {"rows_per_step": plan.rows_per_step}
        self._identity["data"] = train_rows.fingerprint
        if args.load_best_model_at_end:
            if eval_rows is None:
                raise End(
                    Exit.USAGE,
                    "--load_best_model_at_end needs rows to evaluate on: pass --eval_dataset_name, "
                    "--eval_split or --num_eval_documents",
                )
            self._identity["eval_data"] = eval_rows.fingerprint
        if args.use_peft:  # The checkpoint has only the adapters
            look = partial(fingerprint_of_weights, args.model_name_or_path, args.model_revision)
            self._identity["base_weights"] = on_rank_0(look, self._group)
        is_done = on_rank_0(self._has_finished, self._group)
        may_differ = may_change(type(args))
        if self._checkpoint is not None:
            may_differ = {*may_differ, *args.allow_change} - {"rows_per_step"}
            self._refuse_changes(self._restored["arguments"], may_differ)
        elif is_done and args.resume_from_checkpoint == "auto":
            run = json.loads((self._folder / RUN).read_text())
            self._refuse_changes(run["arguments"] | run, may_differ)
        else:
            return
        if is_done and (self._checkpoint is None or self.step >= plan.total_steps):
            raise End(
                Exit.DONE,
                f"Nothing is left to do: the run is done, and the model is in {self._folder}. For "
                "a new run pass another --output_dir, or --resume_from_checkpoint none to replace "
                "the model.",
            )

    def _refuse_changes(self, before: Mapping[str, Any], may_differ: Collection[str]) -> None:
        """Print what differs from the run in the folder; end with 64 if something may not.

        Args:
            before: arguments and identity of that run.
        """
        now = json.loads(json.dumps(vars(self._args) | self._identity))
        refused = []
        for name, value in now.items():
            if value != before.get(name, value) and name != "allow_change":
                line = f"changed since step {self.step}: {name} {before[name]} -> {value}"
                self._accelerator.print(line, flush=True)
                if name not in may_differ:
                    refused.append(name)
        if refused:
            raise End(
                Exit.USAGE,
                f"the run in {self._folder} had other values, listed above: use those, another "
                f"--output_dir or, but for rows_per_step, --allow_change {' '.join(refused)} to "
                "continue from a checkpoint",
            )

    def summarize(self, model: torch.nn.Module, notes: Mapping[str, str]) -> None:
        """Print what is really in force, and write run.json; --dry_run ends here.

        Args:
            notes: the recipe's lines of the summary.
        """
        accelerator = self._accelerator
        notes = dict(notes)
        if accelerator.is_main_process and not self._args.use_peft:
            notes |= note_left_out(self._args, model)
        peak = peak_flops(accelerator.device)
        flops = flops_per_token(model, self._args, self._lengths)
        if peak is not None and flops is not None:
            self._share_of_peak = flops / peak / accelerator.num_processes
            notes["MFU"] = f"of {peak / 1e12:,.0f} TFLOP/s per GPU; a token takes {flops:.3g} FLOPs"
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
        **others: Any,
    ) -> None:
        """Restore these from the checkpoint if there is one. Call it after `prepare`.

        Args:
            others: objects of the recipe's own, by the names of their states in the checkpoint:
                what `state_dict` returns, as JSON.
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
        if accelerator.is_main_process:
            for name in (METRICS, NONFINITE_ROWS, SAMPLES):
                cut_after(self._folder / name, self.step, self._evaluated)
            for predictions in self._folder.glob("predictions-*.jsonl"):  # Of later steps
                if int(predictions.stem.partition("-")[2]) > self.step:
                    predictions.unlink()
        self._metrics = Metrics(accelerator, self._args, self._total_steps, first_step=self.step)
        self._num_seen_before = self._num_seen

    def owes_evaluation(self, evaluate_after: Collection[int]) -> bool:
        """Return whether the state that the loop begins with has to be evaluated and was not."""
        return self.step in evaluate_after and not self._evaluated

    # ---- In the loop ----
    def steps(self, together: int = 1) -> Iterator[int]:
        """Yield the numbers of the steps that are left; the first step of a run is 1.

        The body of the loop has to call `finish_step` once in each. Between steps a checkpoint is
        written if one is due, and if any rank was asked to stop, the run is saved and ends with 75.
        Dropout is drawn from seed, step and rank, so that no random state has to be saved.

        Args:
            together: steps that belong together, between which nothing is saved.
        """
        self._between_steps()
        while self.step < self._total_steps:
            self.seed_dropout(self.step + 1)
            yield self.step + 1
            if self.step % together == 0 or self.step == self._total_steps:
                self._between_steps()
            else:
                self._progress_before = self._progress()
        self._finish_save()
        # Reading the best model and writing the result may take long: from here on no sign of life
        # is expected.
        self._watch.rest()
        self._load_best()
        self._metrics.bar.close()

    def seed_dropout(self, step: int) -> None:
        """Seed what this rank drops in a step, as `steps` does; again before a second pass."""
        place = (self._args.seed, step, self._layout.token_rank)
        seed = int(np.random.SeedSequence(place).generate_state(1)[0])
        if self._accelerator.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

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
        norm = grad_norm
        if isinstance(norm, DTensor):  # FSDP2's
            norm = norm.full_tensor()
        held_back = hold_back(self._accelerator, self._optimizer, norm)
        rows = [batch["row"] for batch in batches]
        step = UncheckedStep(self.step + 1, norm, held_back, rows, losses)
        self._nonfinite.unchecked.append(step)
        if held_back:
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
        graphs = counters["stats"]["unique_graphs"]
        if graphs > self._graphs:
            self._graphs = graphs
            self._compiled_in = self.step
        self._num_seen = self._num_seen + num_seen
        self._metrics.bar.update()
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
        speed = (num_seen_now - int(self._num_seen_before)) / seconds
        line[f"{self._counts}_per_second"] = speed
        line["elapsed_seconds"] = seconds
        line["peak_memory_gib"] = peak_memory_gib()
        shown = {"loss": f"{found['loss']:.4f}", f"{self._counts}/s": f"{speed:,.0f}"}
        if self._share_of_peak is not None:
            line["mfu"] = self._share_of_peak * speed
            shown["MFU"] = f"{line['mfu']:.1%}"
        shown["GiB"] = f"{line['peak_memory_gib']:.1f}"
        self._metrics.write(line, self.step)
        self._metrics.bar.set_postfix(shown, refresh=False)

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Write the evaluation after the current step, and print it above the progress bar."""
        self._metrics.write({"step": self.step, **metrics}, self.step)
        told = [f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items()]
        self._metrics.say(f"step {self.step}: {', '.join(told)} on held-out rows")
        self._evaluated = True
        if self._args.load_best_model_at_end:
            self._note_if_best(metrics)

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of an evaluation; if any rank has to stop meanwhile, save and end."""
        stance = "default"
        if is_compiled(self._accelerator) and self._args.attn_implementation != "flex_attention":
            stance = "force_eager"  # Its batches have many shapes
        with torch.compiler.set_stance(stance):
            for item in items:
                yield item
                if self._any_rank_must_stop():
                    self._evaluated = False
                    self._stop()

    # ---- At the end ----
    def save_and_end(self, code: int, message: str) -> NoReturn:
        """Save the last step and end all ranks, since the next step cannot be trained."""
        self._check_nonfinite()
        self._save_if_new(self._progress())
        self._end(code, message)

    def finish(self, hint: str) -> None:
        """Print how long training took, where the model is, and what to do next."""
        seconds = time.perf_counter() - self._metrics.start
        text = f"Trained in {seconds:.0f} s; the model is in {self._folder}. {hint}"
        if is_compiled(self._accelerator):
            text += f"\nCompiled {self._graphs} graphs, the last one in step {self._compiled_in}."
        self._accelerator.print(text, flush=True)

    # ---- Between steps ----
    def _between_steps(self) -> None:
        """Save if a checkpoint is due; if any rank was asked to stop, save and end."""
        args = self._args
        if self._any_rank_must_stop():
            self._stop()
        if not self._watch.is_training:
            self._watch.begin()
            if RANK == 0:
                self._status.write("running")
        if self.step == 1:  # An optimizer's state that cannot be saved is refused now
            state_of(self._model, self._optimizer.optimizer)
        is_last = self.step == self._total_steps
        due = args.save_steps > 0 and (self.step % args.save_steps == 0 or is_last)
        if self._best is not None and self._best["step"] == self.step:
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

        A checkpoint that is written in the background is taken further.
        """
        stops, ended = self._watch.vote(self._accelerator, int(self._checkpoints.has_ended))
        if ended == self._accelerator.num_processes:
            self._finish_save()
        return stops > 0

    def _stop(self) -> NoReturn:
        """Save the last step and end with 75."""
        self.save_and_end(
            Exit.STOPPED,
            f"Stopped and saved after step {self.step} of {self._total_steps}: run the same "
            "command again to continue",
        )

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
            "best": self._best,
            **{name: other.state_dict() for name, other in self._others.items()},
        }

    def _save_if_new(self, progress: dict[str, Any]) -> None:
        """Write a checkpoint, unless that step has one. Every rank takes part.

        With --async_save it is still being written on return.
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
        self._checkpoints.begin(state_of(self._model, optimizer).boxes, progress)
        self._saved_step = progress["step"]
        if not self._args.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait until the checkpoint under way, if any, is whole. Every rank takes part."""
        # It may take longer than --ddp_timeout, but no disk that answers takes longer than this
        self._watch.show_life(more_seconds=self._checkpoints.seconds_at_most)
        self._checkpoints.finish()
        self._watch.show_life()

    def _checkpoint_is_whole(self, path: Path) -> set[int]:
        """Hand a new checkpoint to the extras, on rank 0; return the steps of others to keep."""
        best = checkpoint.read_progress(path)["best"]
        kept = set() if best is None else {best["step"]}
        return kept.union(*[extra.saved(path) for extra in self._extras])

    def _find_checkpoint(self) -> None:
        """Choose the checkpoint to resume from. Each rank verifies some of the files.

        Ends with 65 if all are damaged, and with 64 if checkpoints of later steps would be lost. A
        file that cannot be read now is not damaged: its OSError ends the run and changes nothing.
        """
        wish = self._args.resume_from_checkpoint
        own, candidates = on_rank_0(self._list_checkpoints, self._group)
        damaged = []
        for path in candidates:
            damage = self._find_damage(path)
            if damage is None:
                self._checkpoint = path
                self._take_over(checkpoint.read_progress(path), own)
                break
            self._accelerator.print(f"passed over {path}: {damage}", file=sys.stderr, flush=True)
            damaged.append(path)
        if damaged and self._checkpoint is None:
            raise End(
                Exit.DATA,
                "no checkpoint can be trusted: choose another --output_dir to start over, or move "
                "them away",
            )
        later = [path for step, path in own.items() if step > self.step and path not in damaged]
        if later and wish != "auto":
            raise End(
                Exit.USAGE,
                f"--resume_from_checkpoint {wish}: {later[0]} is of a run that went further: "
                "continue from that with auto, choose another --output_dir, or move it away",
            )
        if RANK == 0 and not self._args.dry_run:
            checkpoint.set_aside(damaged)

    def _take_over(self, progress: dict[str, Any], own: Collection[int]) -> None:
        """Begin where a checkpoint was made. `own` are the steps of the folder's checkpoints."""
        self._restored = progress
        self.step = progress["step"]
        self._saved_step = self.step
        self._status.step = self.step
        self._evaluated = progress["evaluated"]
        self._num_seen = progress[self._counted]
        self._nonfinite.left_out = progress["nonfinite_steps"]
        best = progress.get("best")
        if best is not None and best["metric"] == self._metric and best["step"] in own:
            self._best = best

    def _find_damage(self, path: Path) -> str | None:
        """Return why a checkpoint cannot be trusted, or None. Every rank looks at some files."""
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        damages = gather(checkpoint.find_damage(path, rank, num_ranks), self._group)
        return next((damage for damage in damages if damage is not None), None)

    def _list_checkpoints(self) -> tuple[dict[int, Path], list[Path]]:
        """Return {step: checkpoint} of the folder, and those to try, in order. Rank 0 calls it."""
        folder = self._folder
        if not self._args.dry_run:
            for staging in folder.glob(f"checkpoint-*{checkpoint.STAGING}"):
                shutil.rmtree(staging, ignore_errors=True)  # A save was killed
            for extra in self._extras:
                extra.before_resume()
        candidates = checkpoint.candidates_in(folder, self._args.resume_from_checkpoint)
        return checkpoint.checkpoints_in(folder), candidates

    def _has_finished(self) -> bool:
        """Return whether the run in the folder is done and has left its result."""
        return self._status.read().get("state") == "done" and has_result(self._folder)

    def _restore(self, path: Path) -> None:
        """Restore the checkpoint's state."""
        accelerator = self._accelerator
        optimizer: Any = self._optimizer.optimizer
        saved = checkpoint.saved_tensors(path)
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        state = state_of(self._model, optimizer, shapes)
        checkpoint.fill(state, path, saved, self._group)
        progress = self._restored
        self._schedule.advance(progress["schedule_steps"])
        restore_loss_scale(accelerator, optimizer, progress.get("loss_scale", {}))
        restore_group_values(optimizer, progress.get("optimizer_groups", []))
        for name, other in self._others.items():
            other.load_state_dict(progress[name])
        made = f"made with {progress['strategy']} on {progress['ranks']} ranks"
        accelerator.print(f"Continuing from {path}, {made}", flush=True)

    # ---- The best evaluation ----
    def _note_if_best(self, metrics: Mapping[str, float]) -> None:
        """Remember the evaluation after the current step if it is the best. Every rank takes part.

        The model before the first step is none to choose: it has no checkpoint.
        """
        value: Any = on_rank_0(partial(metrics.get, self._metric), self._group)  # All agree
        if value is None:
            flag = f"--metric_for_best_model {self._args.metric_for_best_model}"
            self._end(Exit.USAGE, f"{flag}: an evaluation has {', '.join(metrics)}: choose one")
        if not math.isfinite(value) or self._schedule.steps == 0:
            return
        is_greater_better = self._args.greater_is_better
        if is_greater_better is None:
            is_greater_better = not self._metric.endswith(SMALLER_IS_BETTER)
        sign = 1 if is_greater_better else -1
        if self._best is None or sign * value > sign * self._best["value"]:
            self._best = {"step": self.step, "metric": self._metric, "value": value}

    def _load_best(self) -> None:
        """Put the weights of the best evaluation in place of the last. Every rank takes part."""
        best = self._best
        if not self._args.load_best_model_at_end:
            return
        if best is None:
            self._metrics.say("No evaluation can be chosen as the best: the last model is saved")
            return
        self._metrics.say(
            f"Best evaluation from step 1 on: {best['metric']} {best['value']:.4f} "
            f"after step {best['step']}, whose model is saved"
        )
        if best["step"] == self.step:
            return
        path = self._folder / f"checkpoint-{best['step']}"
        damage = self._find_damage(path)
        if damage is not None:
            self._end(Exit.DATA, f"the model of the best evaluation, {path}: {damage}")
        # Training is over: the optimizer's state stays that of the last step
        state = state_of(self._model, self._optimizer.optimizer)
        checkpoint.fill_weights(state, path, self._group)

    # ---- Endings ----
    def _end(self, code: int, message: str) -> NoReturn:
        """Finish the checkpoint under way and end all ranks alike; the message is the last line."""
        self._metrics.bar.close()
        self._finish_save()
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
        is_done = end.code == Exit.DONE
        reasons = on_rank_0(lambda: [extra.ended(is_done) for extra in self._extras], self._group)
        for reason in filter(None, reasons):
            why = f"the result is only in {self._folder}: {reason}; the same command uploads it"
            end = End(Exit.NO_HUB, why)
            if RANK == 0:
                self._status.write("done", end.code, end.why)
        workarounds.keep_group_until_exit()
        self._accelerator.end_training()
        end_together(end)


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
    """Return why a run would overwrite its base, another model or its rows, or None.

    Nothing is written into such a folder, not even a status.
    """
    folder = Path(args.output_dir).resolve()
    if folder == Path(args.model_name_or_path).resolve():
        return "is the folder of --model_name_or_path, which the result would overwrite"
    names = [args.dataset_name] if isinstance(args.dataset_name, str) else [*args.dataset_name]
    if args.eval_dataset_name:
        names.append(args.eval_dataset_name)
    for name in names:
        rows = Path(name).resolve()
        is_own = rows.parent == folder and any(rows.match(own) for own in OWN_FILES)
        if is_own or (rows.is_dir() and folder.is_relative_to(rows)):
            return f"is where the run would overwrite rows of {name}, or read its own files as rows"
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if is_model and not (folder / RUN).is_file():
        return "has a model that is not from a run of these recipes"
    return None
