"""Loops over plain arrays, compiled by Numba: what a processor spends a training step in.

Every loop is a function of arrays and numbers that reads like its formula. It holds no lock of the interpreter, so the
threads of a worker run side by side; it writes to the arrays it is given and allocates nothing of their size. A loop
that may run on several threads takes the range it works on, and its numbers do not depend on how the range was cut.
Products of matrices are BLAS's, through `numpy.dot`.

Only what computes imports this package: Numba takes a process half a second and 140 MB. `Backend.loops` does it.
"""
