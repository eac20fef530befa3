"""The coordinator: the next orders of a run, decided in one place.

A shell tells it facts, with their times, and carries its orders out. It has no I/O, no clock and no weights.
"""
