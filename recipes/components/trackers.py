# SPDX-License-Identifier: Apache-2.0
"""Start the trackers that --report_to names, under the name that --run_name gives."""

from typing import Any

from accelerate import Accelerator

from components.arguments import CommonArguments

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


def start_trackers(accelerator: Accelerator, args: CommonArguments, project: str) -> None:
    """Start the trackers and give them all arguments. Every rank calls it; rank 0 reports.

    Args:
        project: the name of the project that the run belongs to.
    """
    settings: dict[str, dict[str, Any]] = {}
    if args.run_name is not None:
        settings = {name: {key: args.run_name} for name, key in NAME_OF_RUN.items()}
        if args.report_to in NAMED_AS_PROJECT:
            project = args.run_name
    arguments = {name: str(value) for name, value in vars(args).items()}
    accelerator.init_trackers(project, arguments, settings)
    if args.run_name is not None and accelerator.is_main_process:
        for tracker in accelerator.trackers:
            if tracker.name == "comet_ml":  # Its function takes no name.
                tracker.tracker.set_name(args.run_name)
