# SPDX-License-Identifier: Apache-2.0
"""A recipe as a template: the library of copy_recipe.py."""
