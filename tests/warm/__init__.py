# SPDX-License-Identifier: Apache-2.0
"""A server of processes in which the libraries are imported, for the launches of tests."""
