"""Hegde and Usmani's figures 1 to 4: a convolution by batch and products of matrices by size, on processors and a GPU.

    python -m benchmarks.studies.hegde_curves [--device both] [--threads 1 8] [--json FILE] [--figures FOLDER]

The convolution is theirs: the way forward of 96 kernels of 11×11, stride 4, on gray images of 224×224. The paper's text
has a fully connected layer as a product of a matrix by a vector, its captions as one of matrices; both are here, of
square matrices. Each point is the median of ten calls after two more, or of those that fit into --seconds, three at
least after one. Float32 throughout, without TF32. Arrays lie where the work is done. `over the bus`: what a layer reads
comes from the host and its result goes back there, while weights stay. Kernels are prepared anew in each call, as in a
training step. PyTorch is measured beside where it is installed. The fastest of our algorithms counts, and the faster
of its two layouts.

Points that FILE has are not measured again. --tables, --page and --figures measure nothing. --device gpu exits with 2
where there is no GPU. --stand-in tries the code without one, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import conv_gemm
from benchmarks.common import PAUSE, Work, in_fresh_process
from benchmarks.runs import kept_in, markdown, save, show
from benchmarks.studies.gpu import described, no_gpu
from daskcnn.arrays import Array, Device, Workspace, cpu_count, keep_freed_memory, single_threaded_blas
from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.planner import candidates
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Figure

RESULTS = Path(__file__).parent / "results" / "hegde_curves.json"
CONVOLUTION, PRODUCT, VECTOR = "convolution", "matrix by matrix", "matrix by vector"
BATCHES, SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 128, 256, 512, 1024, 2048, 4096)
AXES: Mapping[str, Sequence[int]] = {CONVOLUTION: BATCHES, PRODUCT: SIZES, VECTOR: SIZES}
PAPERS_SLOPES: Mapping[str, float] = {"CPU": 6.45e-3, "GPU": 0.16e-3}
"""Seconds an image: slopes of their figure 1, read as milliseconds; the text has no unit."""
PAPERS_RATIO: Mapping[str, float] = {"theirs, about": 40.0}
"""The paper's GPU over its CPU, by convolutions."""
WARM_UPS, LEAST, CALLS = 2, 3, 10
GPU, BUS = "GPU", "GPU, over the bus"


def spec_of(batch: int) -> ConvSpec:
    """The first layer of their network."""
    return ConvSpec(N=batch, H=224, W=224, C=1, K=96, R=11, S=11, stride=(4, 4))


def noise(*shape: int) -> Array:
    """Random float32 numbers."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@dataclass(frozen=True)
class Ours:
    """This project's arithmetic on a device. carried: inputs come from the host, and results go back there."""

    device: Device
    carried: bool = False

    def convolution(self, batch: int) -> tuple[Work, str]:
        """The way forward by the fastest algorithm, as a run finds by trying them, and its name."""
        spec, device = spec_of(batch), self.device
        w, x = device.backend.from_host(noise(*spec.w_shape)), noise(*spec.x_shape)
        calls = {}
        for each in candidates(spec, device, need_dx=False):
            conv = ALGORITHMS[each.name].bind(spec, device.backend, device.workspace_limit)
            calls[each.name] = self._call(lambda x, conv=conv: conv.forward(x, conv.prepare(w, device), device), x)  # type: ignore[misc]
        name = fastest(calls)
        return calls[name], name

    def product(self, size: int, columns: int) -> tuple[Work, str]:
        """The product of two matrices by rows on the device's threads."""
        a, out = (self.device.backend.from_host(noise(size, n)) for n in (size, columns))
        pool, matmul = self.device.pool, self.device.xp.matmul

        def multiplied(b: Array) -> Array:
            pool.map(lambda rows: matmul(a[rows], b, out=out[rows]), pool.slices(size))
            return out

        return self._call(multiplied, noise(size, columns)), "matmul"

    def _call(self, layer: Callable[[Array], Array], host: Array) -> Work:
        """A call that ends when the device is done. Scratch memory is the device's own from call to call."""
        backend, workspace = self.device.backend, self.device.workspace
        there = backend.from_host(host)

        def call() -> None:
            workspace.recycle()
            y = layer(backend.from_host(host) if self.carried else there)
            if self.carried:
                backend.to_host(y)
            backend.synchronize()

        return call


@dataclass(frozen=True)
class Torch:
    """PyTorch on `cpu`, with this number of threads, or on `cuda`."""

    device: str
    threads: int = 1

    def convolution(self, batch: int) -> tuple[Work, str]:
        """The way forward, in the faster one of two layouts, and its name."""
        torch = self._torch()
        spec = spec_of(batch)
        x, w = (torch.from_numpy(noise(*shape)) for shape in ((batch, 1, spec.H, spec.W), (spec.K, 1, spec.R, spec.S)))
        calls = {}
        for name in ("contiguous_format", "channels_last"):
            own = [each.to(self.device, memory_format=getattr(torch, name)) for each in (x, w)]
            calls[name] = self._call(lambda own=own: torch.nn.functional.conv2d(*own, stride=spec.stride))  # type: ignore[misc]
        name = fastest(calls)
        return calls[name], name

    def product(self, size: int, columns: int) -> tuple[Work, str]:
        """The product of two matrices."""
        torch = self._torch()
        a, b = (torch.from_numpy(noise(size, n)).to(self.device) for n in (size, columns))
        return self._call(lambda: torch.matmul(a, b)), "matmul"

    def _call(self, work: Work) -> Work:
        torch = self._torch()
        if self.device == "cpu":
            return work
        return lambda: (work(), torch.cuda.synchronize())

    def _torch(self) -> Any:
        import torch

        torch.set_num_threads(self.threads)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return torch


Side = Ours | Torch


def sides(given: argparse.Namespace, gpu: bool) -> Iterator[tuple[str, Side]]:
    """All that is measured, by name."""
    torch = not given.no_torch and find_spec("torch") is not None
    if given.device != "gpu":
        for threads in given.threads:
            name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
            yield name, Ours(Device.of("cpu", threads=threads))
            if torch:
                yield f"PyTorch, {name}", Torch("cpu", threads)
    if gpu:
        device = _stand_in() if given.stand_in else Device.of("gpu")
        yield from {GPU: Ours(device), BUS: Ours(device, carried=True)}.items()
        if torch and not given.stand_in and _torch_has_gpu():
            yield f"PyTorch, {GPU}", Torch("cuda")


def _stand_in() -> Device:
    from tests.standin import STANDIN

    return Device(STANDIN, workspace=Workspace(STANDIN.xp), tuned=False)


def _torch_has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def timed(work: Work, seconds: float) -> dict[str, Any]:
    """The median of the calls that fit in these seconds, and their number."""
    begun = time.perf_counter()
    for _ in range(WARM_UPS):
        if time.perf_counter() - begun < seconds or not seconds:
            work()
    time.sleep(PAUSE)
    begun, taken = time.perf_counter(), list[float]()
    while len(taken) < LEAST or (len(taken) < CALLS and time.perf_counter() - begun < seconds):
        at = time.perf_counter()
        work()
        taken.append(time.perf_counter() - at)
    return {"seconds": median(taken), "calls": len(taken)}


def fastest(calls: Mapping[str, Work]) -> str:
    """The name of the call of the least median."""
    return min(calls, key=lambda name: timed(calls[name], 0.0)["seconds"])


def measured(side: Side, what: str, size: int, seconds: float) -> dict[str, Any]:
    """A point of a curve."""
    with single_threaded_blas():
        if what == CONVOLUTION:
            work, by = side.convolution(size)
        else:
            work, by = side.product(size, size if what == PRODUCT else 1)
        return {**timed(work, seconds), "by": by}


# --- output ---

Curves = dict[str, dict[int, float]]
"""Seconds by side and by batch or size."""


def curves_of(kept: Mapping[str, Any], what: str) -> Curves:
    """The points of a figure that a file has."""
    found: Curves = {}
    for size, points in sorted(kept["measured"].get(what, {}).items(), key=lambda each: int(each[0])):
        for side, point in points.items():
            found.setdefault(side, {})[int(size)] = point["seconds"]
    return found


def slope(curve: Mapping[int, float]) -> float:
    """Seconds an image: the least squares' line through a curve."""
    return float(np.polyfit(list(curve), list(curve.values()), 1)[0])


def power(curve: Mapping[int, float]) -> float:
    """The n of O(sizeⁿ), between the two largest sizes."""
    (before, a), (last, b) = sorted(curve.items())[-2:]
    return float(np.log(b / a) / np.log(last / before))


def fastest_cpu(curves: Curves) -> str:
    """The name of our curve with the most threads of the processors."""
    return max((name for name in curves if name.startswith("CPU")), key=lambda name: int(name.split()[1]))


def table(kept: Mapping[str, Any], what: str) -> str:
    """Milliseconds of every point in Markdown, and what the curve amounts to."""
    curves = curves_of(kept, what)
    sizes = sorted({size for curve in curves.values() for size in curve})
    last = "ms an image" if what == CONVOLUTION else "grows as n to the"
    rows = []
    for side, curve in curves.items():
        cells = (_milliseconds(curve[size]) if size in curve else "–" for size in sizes)
        whole = len(curve) > 1
        amount = (_milliseconds(slope(curve)) if what == CONVOLUTION else f"{power(curve):.2f}") if whole else "–"
        rows.append([side, *cells, amount])
    return markdown([what, *map(str, sizes), last], rows, left=[0])


def _milliseconds(seconds: float) -> str:
    return f"{float(f'{1e3 * seconds:.3g}'):,g}"


def page(kept: Mapping[str, Any]) -> str:
    """All tables."""
    of = kept["machine"]
    theirs = ", ".join(f"{1e3 * each:g} on their {device}" for device, each in PAPERS_SLOPES.items())
    torch = f"PyTorch {of['torch']}" if of["torch"] else "no PyTorch"
    return "\n\n".join(
        [
            "# Hegde and Usmani's figures 1 to 4",
            f"Made by `benchmarks/studies/hegde_curves.py` from `results/hegde_curves.json`: {of['processor']}, "
            f"{of.get('gpu', 'no GPU')}, NumPy {of['numpy']}, {torch}. Milliseconds, medians of calls. "
            "The convolution is by images of a batch, products are by rows of the square matrix. `over the bus`: "
            "inputs come from the host, and results go back there.",
            *(table(kept, what) for what in AXES),
            f"Theirs of the convolution, milliseconds an image: {theirs}. Their text has no unit; these are read as "
            "milliseconds.\n",
        ]
    )


def figures(kept: Mapping[str, Any]) -> Iterator[Figure]:
    """Their figures 1 to 4, each with what the file has."""
    gpu = kept["machine"].get("gpu", "")
    for what, numbers in ((CONVOLUTION, (1, 2)), (PRODUCT, (3, 4)), (VECTOR, (3, 4))):
        if not (curves := curves_of(kept, what)):
            continue
        name, x = what.replace(" ", "-"), "images in a batch" if what == CONVOLUTION else "rows of the matrix"
        like = "Hegde and Usmani, fig. {}"
        most = fastest_cpu(curves)
        drawn = {
            side: (list(curve), list(curve.values()))
            for side, curve in curves.items()
            if "CPU" not in side or side.endswith(most)
        }
        if what == CONVOLUTION:
            sizes = sorted({size for curve in curves.values() for size in curve})
            drawn |= {f"theirs, {k}": (sizes, [s * n for n in sizes]) for k, s in PAPERS_SLOPES.items()}
        title = f"{what}: seconds on {kept['machine']['processor']}{gpu and ' and ' + gpu}"
        yield Figure(f"hegde-{name}", title, like.format(numbers[0]), x, "seconds", drawn, rates=True)
        if GPU in curves:
            yield _ratios(curves, f"hegde-{name}-speedup", f"{what}: times as fast", like.format(numbers[1]), x)


def _ratios(curves: Curves, name: str, title: str, like: str, x: str) -> Figure:
    """The speed of the GPU, in multiples of that of each number of threads."""
    gpu, found = curves[GPU], {}
    for side in (side for side in curves if side.startswith("CPU")):
        both = [size for size in curves[side] if size in gpu]
        found[f"GPU over {side}"] = (both, [curves[side][size] / gpu[size] for size in both])
    if BUS in curves:
        side = fastest_cpu(curves)
        both = [size for size in curves[side] if size in curves[BUS]]
        found[f"{BUS}, over {side}"] = (both, [curves[side][size] / curves[BUS][size] for size in both])
    return Figure(name, title, like, x, "times as fast", found, doubling=True, levels=PAPERS_RATIO)


def machine(given: argparse.Namespace, gpu: bool) -> dict[str, Any]:
    """The machine, with all of its devices."""
    device = {"gpu": "stand-in"} if given.stand_in else in_fresh_process(described) if gpu else {}
    return {**conv_gemm.machine(), "torch": version("torch") if find_spec("torch") else None, **device}


def arguments() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "gpu", "both"), default="both")
    threads = sorted({1, cpu_count()})
    options.add_argument("--threads", nargs="+", type=int, default=threads, help=f"default: {threads}")
    options.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    options.add_argument("--seconds", type=float, default=0.3, help="of a point; default: %(default)s")
    options.add_argument("--no-torch", action="store_true", help="ours only")
    options.add_argument("--stand-in", action="store_true", help="try the code without a GPU")
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in this file")
    options.add_argument("--tables", action="store_true", help="print what FILE holds, and measure nothing")
    options.add_argument("--page", type=Path, metavar="PAGE", help="write what FILE holds to this page")
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw what FILE holds, and measure nothing")
    return options.parse_args()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the points that are missing. Raises SystemExit(2) where a GPU alone is asked for, and there is none."""
    missing = None if given.stand_in else no_gpu()
    if missing and given.device != "cpu":
        print(f"no curves of a GPU: {missing}", file=sys.stderr)
        if given.device == "gpu":
            raise SystemExit(2)
    kept = kept_in(given.json, machine(given, not missing))
    keep_freed_memory()  # as a run does: most of a call would be fresh pages for its result
    for name, side in sides(given, not missing and given.device != "cpu"):
        for what in AXES:
            for size in given.batches if what == CONVOLUTION else given.sizes:
                points = kept.setdefault("measured", {}).setdefault(what, {}).setdefault(str(size), {})
                if name not in points:
                    points[name] = measured(side, what, size, given.seconds)
            if given.json:
                save(given.json, kept)
    return kept


def main() -> None:
    """Measure, print and draw."""
    given = arguments()
    shown = given.tables or given.page or given.figures
    kept = json.loads((given.json or RESULTS).read_text(encoding="utf-8")) if shown else measure(given)
    show(page(kept), given.page)
    for figure in figures(kept) if given.figures else ():
        print(draw(figure, given.figures / f"{figure.name}.svg"))


if __name__ == "__main__":
    main()
