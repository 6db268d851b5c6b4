# SPDX-License-Identifier: Apache-2.0
"""Trials of scripts/fault_injection.py: promises about runs that something stops, kills or damages.

`lab` starts runs, `outcome` compares what they left, and `trial` defines what a trial is. Each
other module has one topic: functions that try a promise once, and lists of a group's trials.
`groups` names the groups, `running` runs their trials, `report` writes the tables.
"""
