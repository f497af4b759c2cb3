"""The commands of `python -m stackax`, one file each, and what they have in common."""
