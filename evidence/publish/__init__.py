# SPDX-License-Identifier: Apache-2.0
"""Library of commands that write published pages.

evidence/readme_tables.py writes the tables of the measurements in results/.
evidence/write_examples.py writes the planned memory of examples/.
"""
