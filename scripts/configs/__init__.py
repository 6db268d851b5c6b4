# SPDX-License-Identifier: Apache-2.0
"""What an accelerate config does, what is wrong with it, and how to fix it: for check_config.py.

edits          edits of YAML text that leave everything else as it is
flow_style     the same inside {key: value, ...}
comments       the comments of YAML text, and those that belong to a key
fixes          the edits of all findings on a file
description    what a config does, in words
reports        everything that is reported about a file, for people and for programs
"""

import paths  # noqa: F401  makes recipes/ importable
