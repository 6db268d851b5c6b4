# SPDX-License-Identifier: Apache-2.0
"""What every copied recipe takes along. These modules import one another and libraries only."""

# The recipes, the commands and each copy of a recipe have this version
__version__ = "0.1.0"
