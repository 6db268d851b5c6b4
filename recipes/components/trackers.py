# SPDX-License-Identifier: Apache-2.0
"""Start the trackers that --report_to names, under the name that --run_name gives."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from core.arguments import CommonArguments

# What each tracker's own function calls the name of a run (accelerate/tracking.py)
NAME_OF_RUN = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "clearml": "task_name",
    "dvclive": "exp_name",
    "swanlab": "experiment_name",
}
# accelerate gives these the project's name as that of the run
NAMED_AS_PROJECT = ("tensorboard", "aim")
# The package of a tracker, where it has another name
PACKAGES = {"comet_ml": "comet-ml"}


def find_missing_tracker(args: CommonArguments) -> Iterator[str]:
    """Yield a line if the tracker is not installed: accelerate would leave it out silently."""
    name = args.report_to
    available = [tracker.value for tracker in get_available_trackers()]
    if name == "none" or name in available or (name == "all" and available):
        return
    if name == "all":
        yield "--report_to all: no tracker is installed: pip install tensorboard, or leave it out"
        return
    yield (
        f"--report_to {name} needs a package that is not installed: "
        f"pip install {PACKAGES.get(name, name)}, or leave it out"
    )


def start_trackers(
    accelerator: Accelerator, args: CommonArguments, project: str, resumed: bool
) -> None:
    """Start the trackers and give them all arguments. Every rank calls it; rank 0 reports.

    Args:
        project: the name of the project that the run belongs to.
        resumed: whether an earlier call of the run has reported steps.
    """
    settings: dict[str, dict[str, Any]] = {}
    if args.run_name is not None:
        settings = {name: {key: args.run_name} for name, key in NAME_OF_RUN.items()}
        if args.report_to in NAMED_AS_PROJECT:
            project = args.run_name
    if args.report_to in ("trackio", "all"):
        settings["trackio"] = trackio_settings(args, resumed)
    arguments = {name: str(value) for name, value in vars(args).items()}
    accelerator.init_trackers(project, arguments, settings)
    if args.run_name is not None and accelerator.is_main_process:
        for tracker in accelerator.trackers:
            if tracker.name == "comet_ml":  # Its function takes no name.
                tracker.tracker.set_name(args.run_name)


def trackio_settings(args: CommonArguments, resumed: bool) -> dict[str, str]:
    """Return how trackio is to begin a run, or to continue it.

    It finds the run to continue by its name, and would make up another one in each call. The
    output folder names a run without a --run_name: the same command has the same one.
    """
    name = args.run_name or args.output_dir
    return {"name": name, "resume": "allow" if resumed else "never"}


def log_table(
    accelerator: Accelerator, name: str, rows: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Log rows of texts to the trackers that show tables; the others get nothing.

    Only rank 0 may call it.

    Args:
        rows: at least one; all have the same keys.
    """
    columns = list(rows[0])
    cells = [[str(row[column]) for column in columns] for row in rows]
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            writer = tracker.tracker
            writer.add_text(name, markdown_table(columns, cells), global_step=step)
            writer.flush()
        elif hasattr(tracker, "log_table"):
            tracker.log_table(name, columns=columns, data=cells, step=step)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, as TensorBoard shows it."""
    rule = ["---"] * len(columns)
    lines = []
    for cells in [columns, rule, *rows]:
        escaped = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)
