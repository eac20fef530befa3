"""Benchmarks: how fast it is, against bars of its own. Run them from the folder above: `python -m benchmarks.step`."""
