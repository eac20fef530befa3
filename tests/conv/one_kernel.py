"""The laws of rounding under one kernel of OpenBLAS: python -m tests.conv.one_kernel NAME few|all.

A process has one kernel, which OPENBLAS_CORETYPE chooses before NumPy is loaded. Ends with OTHER where the library runs
another kernel in its place.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

OTHER = 3
CALLED = {"Katmai": "Prescott"}
"""OpenBLAS's other name of a kernel."""
THREADS = (1, 2, 4)


def kernels() -> set[str]:
    """The kernels that run in this process, by the names that OPENBLAS_CORETYPE takes."""
    found = {str(info.get("architecture")) for info in threadpool_info() if info["user_api"] == "blas"}
    return {CALLED.get(name, name) for name in found}


def hold_the_laws(every: bool) -> int:
    """Hold an algorithm of every kind, or every one with every problem, to its rounding. Return how many those were.

    Compiled loops run on so many threads, array expressions with so many of BLAS.
    """
    from daskcnn.arrays import Device, Pool, single_threaded_blas
    from tests.conv.test_conv_laws import FEW, SINGLE, arrays, cases, in_double, once
    from tests.rounding import assert_rounds, of_direction
    from tests.standin import device_of

    smaller = {name: replace(spec, N=spec.N // 8) for name, spec in SINGLE.items()}
    problems = [case.values for case in cases(smaller)] if every else FEW
    for name, spec in problems:
        host, exact, results = arrays(spec), in_double(spec), []
        for threads in THREADS:
            with single_threaded_blas(), closing(Pool(threads)) as pool:
                results.append(once(name, spec, host, Device(pool=pool)))
            with threadpool_limits(threads, "blas"):
                expressions = once(name, spec, host, device_of("standin"))
            for compiled, found in ((True, results[-1]), (False, expressions)):
                for direction, result in found.items():
                    about = f"{name} of {spec}, {direction}, {threads} threads, compiled: {compiled}"
                    allowed = of_direction(name, spec, direction, compiled=compiled)
                    assert_rounds(result, exact[direction], allowed, about)
        for direction, result in results[0].items():
            for other in results[1:]:
                np.testing.assert_array_equal(result, other[direction], err_msg=f"{name} of {spec}, {direction}")
    return len(problems)


if __name__ == "__main__":
    asked, which = sys.argv[1:]
    if asked not in kernels():
        print(f"in place of {asked} runs {', '.join(sorted(kernels())) or 'another library'}")
        sys.exit(OTHER)
    print(hold_the_laws(which == "all"))
