# SPDX-License-Identifier: Apache-2.0
"""Check an accelerate config against all rules.

`scripts/check_config.py` checks any file, and each recipe checks the file that its launcher read
(launch_file.py). Most rules are about accelerate and DeepSpeed and apply to every file; the
others are requirements of these recipes (config_findings.WISHES).

A rule is a function that is named after what must hold and yields a finding if it does not. Its
docstring gives the reason. The facts come from the sources that accelerate_keys.py and
deepspeed_keys.py name, and tests prove the important ones with accelerate's launcher and plugins.
"""

from dataclasses import replace

from components.config_findings import Finding, worst_first
from components.config_reading import Config
from components.config_rules_deepspeed import rules_of_deepspeed
from components.config_rules_deepspeed_json import rules_of_json
from components.config_rules_fsdp import rules_of_fsdp
from components.config_rules_keys import rules_of_names, rules_of_values
from components.config_rules_launch import (
    rules_of_engine,
    rules_of_precision,
    rules_of_processes,
)
from components.config_rules_mesh import rules_of_mesh

RULES = (
    rules_of_deepspeed,
    rules_of_names,
    rules_of_values,
    rules_of_engine,
    rules_of_processes,
    rules_of_mesh,
    rules_of_precision,
    rules_of_fsdp,
)


def check(
    content: dict, deepspeed: dict | None = None, for_recipes: bool = False
) -> tuple[list[Finding], dict]:
    """Return the findings on a config, worst first, and the config as accelerate reads it.

    Args:
        content: content of the YAML, as written.
        deepspeed: content of the DeepSpeed JSON that it points to.
        for_recipes: whether the requirements of these recipes count too.
    """
    config = Config.of(content, deepspeed)
    found = [item for rule in RULES for item in rule(config)]
    if deepspeed is not None:
        found += [replace(item, in_json=True) for item in rules_of_json(deepspeed)]
    return worst_first(replace(item, for_recipes=for_recipes) for item in found), config.read
