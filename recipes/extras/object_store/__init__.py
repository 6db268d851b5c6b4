# SPDX-License-Identifier: Apache-2.0
"""--output_url: a copy of the run's folder in an object store."""
