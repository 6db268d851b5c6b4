# SPDX-License-Identifier: Apache-2.0
"""What in the launched YAML has no effect, or costs: `rules.py`, and `deepspeed_json.py`.

At a launch a setting that would silently not be in force ends the run (`hooks.py`).
scripts/check_config.py prints all that is found, of any accelerate config.
"""
