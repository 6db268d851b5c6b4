# SPDX-License-Identifier: Apache-2.0
"""Say whether a file is what its engine accepts.

    validate.py skypilot FILE          as SkyPilot's own client reads it
    validate.py trainjob FILE SCHEMA   against the schema of the TrainJob

This runs in the environment of requirements-clusters.txt, and imports nothing of this project.
"""

import json
import sys

import yaml


def main() -> None:
    """Print the number of nodes of a valid file; otherwise end with the engine's message."""
    kind, path, *schema = sys.argv[1:]
    if kind == "skypilot":
        import sky

        task = sky.Task.from_yaml(path)
        print(task.num_nodes)
        return
    import jsonschema

    with open(schema[0]) as file:
        rules = json.load(file)
    with open(path) as file:
        job = yaml.safe_load(file)
    jsonschema.validate(job, rules)
    print(job["spec"]["trainer"]["numNodes"])


if __name__ == "__main__":
    main()
