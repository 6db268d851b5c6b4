# SPDX-License-Identifier: Apache-2.0
"""What one or two recipes need. These modules import the core, one another and libraries only."""
