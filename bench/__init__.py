"""Measures triton_kv against the hardware and against what a user would pick instead: `python -m bench --help`."""
