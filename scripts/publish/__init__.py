"""Library of scripts/readme_tables.py: what is published of the measurements in results/."""
