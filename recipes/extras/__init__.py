# SPDX-License-Identifier: Apache-2.0
"""One folder per feature that most runs do not need. Each imports the core; nothing imports it."""
