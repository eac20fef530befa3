"""A folder of images into a data set, decoded by the workers of a cluster: `daskcnn data prepare folder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client

from daskcnn.cluster.link.calls import Check, no_check
from daskcnn.cluster.link.client import given_or_default
from daskcnn.cluster.link.connect import check_scheduler, connect
from daskcnn.cluster.link.signals import Signals
from daskcnn.cluster.run.admission import require_sight
from daskcnn.cluster.spread.spread import spread
from daskcnn.datasets.names import check_name, name_of
from daskcnn.errors import DataError, Interrupted, escaped
from daskcnn.job.tables import Cluster
from daskcnn.show.renderers import terminal
from daskcnn.store.chunk_facts import ChunkFacts
from daskcnn.store.dataset import Dataset, open_dataset
from daskcnn.store.files import is_url
from daskcnn.store.making import folder_plan
from daskcnn.store.making.folder import Listing, list_folder
from daskcnn.store.making.prepare import refuse_occupied, taken
from daskcnn.store.making.writer import Draft, Occupied, drafted
from daskcnn.store.manifest import MAX_CHUNK_BYTES, PARTS, Fit, Order, ValueRange, assemble, ordered
from daskcnn.store.split import check_seed

TEST = 0.2
"""Share of the images that becomes the test part, where neither the user nor the folder says."""
FEW = 500
"""Images that are decoded in this process, where no cluster is given: starting one takes longer."""
_SHOWN = 50
_DARK = 64
"""Images of 16 bits without a pixel so bright probably have fewer bits in fact, such as 12."""
_REMEDY = "mend or remove them, or leave them out with --skip-bad (skip_bad=True)"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The data set to be made of a folder, as in `prepare_folder`; a test share of None is the folder's, or `TEST`."""

    path: str
    out: str
    look: folder_plan.Appearance
    test: float | None = None
    order: Order = "shuffled"
    seed: int = 0
    skip_bad: bool = False
    name: str | None = None


def prepare_folder(
    path: str | Path,
    store: str | Path,
    *,
    size: tuple[int, int] | int,
    fit: Fit = "crop",
    grey: bool = False,
    test: float | None = None,
    order: Order = "shuffled",
    seed: int = 0,
    skip_bad: bool = False,
    name: str | None = None,
    value_range: ValueRange | None = None,
    client: Client | None = None,
    warn: Say = terminal.warn,
) -> Dataset:
    """Write the images of a folder with a sub-folder for each class as a data set, and open it.

    Parameters
    ----------
    path : folder of the images: `CLASS/…`, or `train/CLASS/…` and `test/CLASS/…`
    store : path or URL of the data set
    size : (height, width) of the images in it, or one number for both
    fit : what is done about other proportions: "crop" cuts off what is too much, "pad" adds black, "stretch" distorts
    grey : whether images have one channel, and not red, green and blue
    test : share of the images that becomes the test part, of each class alike; 0.2 if not given
    order : "shuffled", or "stored": by class and name
    seed : of the split and the shuffle
    skip_bad : whether images that cannot be read are left out; they are refused otherwise
    name : of the data set. Default: the store's name
    value_range : (low, high), the numbers that are black and white in grey images of more than 8 bits. Those of 16 bits
        have 0 and 65,535 if not given; images of real numbers or of 32 bits are refused without. Colours of 16 bits
        always have 0 and 65,535, and are refused with a range
    client : of the cluster that decodes the images. Without one the default client is used, or else a local cluster is
        started.
    warn : called with what was left out. Default: a line on stderr

    Raises
    ------
    DataError : naming what is wrong with the folder or its images
    ClusterError : where a worker does not see the folder

    Examples
    --------
    >>> daskcnn.prepare_folder("flowers", "data/flowers.zarr", size=(64, 64))  # doctest: +SKIP
    """
    check_seed(seed)
    look = folder_plan.Appearance(_sides(size), fit, grey, value_range)
    request = Request(str(path), str(store), look, test, order, int(seed), skip_bad, name)
    return prepare(request, client=given_or_default(client), say=lambda _: None, warn=warn, quiet=True)


def prepare(
    request: Request,
    *,
    cluster: Cluster | None = None,
    client: Client | None = None,
    say: Say,
    warn: Say,
    quiet: bool = False,
    handle_signals: bool = False,
) -> Dataset:
    """Decode on the client's workers or those of the cluster; without both here, or on a local cluster."""
    check_request(request)
    if client is None and cluster is not None:
        check_scheduler(cluster)
    refuse_occupied(request.out)
    listing = list_folder(request.path)
    if request.test is not None and listing.test is not None:
        raise DataError(f"test={request.test}", f"{listing.root} has train/ and test/ of its own", "leave it out")
    for note in listing.notes:
        warn(f"{listing.root}: {note}")
    with ExitStack() as stack:
        check = stack.enter_context(interruptible()) if handle_signals else no_check
        _write(request, listing, _Workers(cluster, client, check, say, warn, quiet))
    return open_dataset(request.out)


def _sides(size: Any) -> tuple[int, int]:
    height: Any
    width: Any
    try:
        height, width = (size, size) if isinstance(size, int | np.integer) else size
    except (TypeError, ValueError):  # no pair
        height = width = None
    if not all(isinstance(side, int | np.integer) for side in (height, width)):
        reason = "whole numbers of pixels are needed"
        raise DataError(f"size={size!r:.60}", reason, "give (height, width), or one number for both")
    return int(height), int(width)


def check_request(request: Request) -> None:
    """Raise DataError for a size, share or name that cannot be."""
    H, W, C = request.look.shape
    if min(H, W) < 1 or H * W * C > MAX_CHUNK_BYTES:
        reason = f"an image has 1 to {MAX_CHUNK_BYTES:,} bytes"
        raise DataError(f"size {H}x{W}", reason, "give HEIGHTxWIDTH, such as 64x64")
    if (given := request.look.value_range) is not None:
        try:
            ordered(given)
        except ValueError as error:
            raise DataError(f"value range {given!s:.60}", error, "give those of black and white: 0,4095") from error
    check_seed(request.seed)
    share: Any = request.test
    if share is not None and not (isinstance(share, float | np.floating) and 0 < share < 1):
        raise DataError(f"test={share!r:.60}", "a share between 0 and 1 is needed", "give one such as 0.2")
    if request.name is not None:
        check_name(request.name)


@contextmanager
def interruptible() -> Iterator[Check]:
    """Yield a check that raises Interrupted once a signal has come."""
    signals = Signals()
    signals.polled = True

    def check() -> None:
        if signals.first is not None:
            raise Interrupted.by(signals.first, "; nothing was written")

    with signals.installed():
        yield check


@dataclass(frozen=True)
class _Workers:
    """The cluster that decodes images, and the callbacks meanwhile."""

    cluster: Cluster | None
    client: Client | None
    check: Check
    say: Say
    warn: Say
    quiet: bool

    @contextmanager
    def there(self, images: int) -> Iterator[Client | None]:
        """A client; None where this process decodes so few images itself."""
        if self.client is not None:
            yield self.client
        elif self.cluster is None and images <= FEW:
            yield None
        else:
            with connect(self.cluster or Cluster(), self.check, self.say, server=False) as client:
                yield client

    def over(
        self, client: Client | None, function: Callable[[Any], Any], items: Sequence[Any], what: str
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each item with what the function makes of it, and show how far it is, counted in images."""
        total = sum(len(item.piece.samples) for item in items)
        found = spread(client, function, items, self.cluster, check=self.check, warn=self.warn)
        with nullcontext() if self.quiet else terminal.Counter(what, total) as counter:
            for item, made in found:
                if counter is not None:
                    counter.add(len(item.piece.samples))
                yield item, made


@dataclass
class _Found:
    """The facts of each chunk of decoded images, by part and number, and the SHA-256 of each file's content, (N, 32).

    `bad` has what is wrong with each image that cannot be used, by its number in the listing. `deep` and `brightest`
    are as in `folder_plan.Decoded`.
    """

    digests: npt.NDArray[np.uint8]
    facts: dict[tuple[str, int], ChunkFacts] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    deep: int = 0
    brightest: int = 0


def _write(request: Request, listing: Listing, workers: _Workers) -> None:
    plan, common = _planned(request, listing)
    try:
        # the draft makes folders: where there is no cluster, none is left behind
        with workers.there(len(listing.files)) as client, drafted(request.out, plan.draft(common)) as draft:
            found = _decoded(request, plan, draft, workers, client)
            if found.deep and found.brightest < _DARK:
                used = f"use levels 0 to {found.brightest} of 255, as 65,535 would be white"
                remedy = "state the numbers that are black and white: --value-range LOW,HIGH (value_range=)"
                remedy += "; colours: write files of 8 bits"
                workers.warn(f"{listing.root}: {found.deep:,} images of 16 bits {used}; {remedy}")
            if not found.bad:
                _finish(draft, common, listing, found)
                return
            count, told = _bad(listing, found.bad)
            if not request.skip_bad:
                raise DataError(listing.root, count, f"{_REMEDY}:\n{told}")
            workers.warn(f"{listing.root}: {count} and are left out:\n{told}")
            _write_good(request, plan, draft, found, workers, client)
    except Occupied:
        raise taken(request.out) from None


def _planned(request: Request, listing: Listing) -> tuple[folder_plan.Plan, dict[str, Any]]:
    shape = request.look.shape
    test = TEST if request.test is None else request.test
    how: dict[str, Any] = {"order": request.order, "seed": request.seed}
    plan = folder_plan.plan_folder(listing, test=test, sample_bytes=int(np.prod(shape)), **how)
    how |= {"fit": request.look.fit, "value_range": request.look.value_range}
    return plan, plan.common(name=request.name or name_of(request.out), shape=shape, **how)


def _decoded(
    request: Request, plan: folder_plan.Plan, draft: Draft, workers: _Workers, client: Client | None
) -> _Found:
    """Decode all images into a draft."""
    listing = plan.listing
    if client is not None:
        only = (workers.cluster or Cluster()).only or ()
        require_sight(client, listing.root, draft.path, workers.check, only)
    found = _Found(np.zeros((len(listing.files), 32), np.uint8))
    decode = partial(folder_plan.decode_piece, root=listing.root, look=request.look, draft=draft)
    works = [folder_plan.PieceWork(piece, tuple(listing.files[i] for i in piece.samples)) for piece in plan.pieces()]
    for work, decoded in workers.over(client, decode, works, "decode images"):
        piece = work.piece
        found.facts[piece.part, piece.index] = decoded.facts
        found.digests[piece.samples] = decoded.digests
        found.bad |= {int(piece.samples[index]): reason for index, reason in decoded.bad.items()}
        found.deep, found.brightest = found.deep + decoded.deep, max(found.brightest, decoded.brightest)
    return found


def _write_good(
    request: Request, plan: folder_plan.Plan, draft: Draft, found: _Found, workers: _Workers, client: Client | None
) -> None:
    """Write a data set without the bad images: it is the one that a folder without them would give."""
    listing = plan.listing.without(list(found.bad))
    good, common = _planned(request, listing)
    with drafted(request.out, good.draft(common), claimed=True) as target:
        if is_url(request.out):  # nothing lies beside it to read from
            again = _decoded(request, good, target, workers, client)
            if again.bad:
                count, told = _bad(listing, again.bad)
                raise DataError(listing.root, count, f"{_REMEDY}:\n{told}")
        else:
            again = _Found(np.delete(found.digests, list(found.bad), axis=0))
            repack = partial(folder_plan.repack_piece, source=draft, target=target)
            for job, facts in workers.over(client, repack, list(_moved(plan, good, found.bad)), "put together"):
                again.facts[job.piece.part, job.piece.index] = facts
        _finish(target, common, listing, again)


def _moved(plan: folder_plan.Plan, good: folder_plan.Plan, bad: Mapping[int, str]) -> Iterator[folder_plan.Repacked]:
    """Each chunk of the good images, and where in the first draft they are."""
    test, rows = plan.positions()
    before = np.delete(np.arange(len(plan.listing.files)), list(bad))
    for piece in good.pieces():
        old = before[piece.samples]
        yield folder_plan.Repacked(piece, test[old], rows[old])


def _finish(draft: Draft, common: Mapping[str, Any], listing: Listing, found: _Found) -> None:
    facts = {part: [found.facts[key] for key in sorted(found.facts) if key[0] == part] for part in PARTS}
    sources = {"images": folder_plan.digest_of(listing.files, found.digests)}
    draft.finish(assemble({**common, "sources": sources}, facts))


def _bad(listing: Listing, bad: Mapping[int, str]) -> tuple[str, str]:
    """The number of images that cannot be used, and the reasons, a line each for the first ones."""
    lines = [f"  {escaped(listing.files[index])}: {escaped(bad[index])}" for index in sorted(bad)[:_SHOWN]]
    more = [f"  … and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else []
    return f"{len(bad):,} of {len(listing.files):,} images cannot be used", "\n".join([*lines, *more])
