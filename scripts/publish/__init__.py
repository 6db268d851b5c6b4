"""Library of scripts/readme_tables.py: the published tables of the measurements in results/."""
