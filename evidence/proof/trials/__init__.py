# SPDX-License-Identifier: Apache-2.0
"""Trials of evidence/fault_injection.py: promises about runs that are stopped, killed, damaged.

`lab` starts runs, `outcome` compares what they left, and `trial` defines what a trial is. Each
other module has one topic: functions that try a promise once, and lists of a group's trials.
`groups` names the groups, `running` runs their trials, `report` writes the tables.
"""
