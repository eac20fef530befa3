"""The coordinator: what a run does next, decided in one place. Facts in, orders out; no I/O, no clock, no weights."""
