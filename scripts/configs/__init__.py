"""What an accelerate config does, what is wrong with it, and its edits: check_config.py's library.

edits          edits of YAML text that leave all else as it is
fixes          the edits of all findings on a file
description    what a config does, in words
reports        all that is said about a file, for people and for programs
"""

import paths  # noqa: F401  makes recipes/ importable
