"""Vectors on the wire between a replica and the server: in one number type, or their changes in int8 with feedback.

float16. Weights would lose most of what a step adds to them: a gain of less than half a unit of the weight is rounded
away, at every meeting. So behind a barrier replicas push their difference to the center that they were given, as it
came out of the wire. The server adds it to its own center, which stays in float32. What rounding has kept back from the
replicas is still in that center, so gains add up there. Nothing is kept for a replica; one that joins late, or after a
resume, is given a center and pushes its difference to that. Answers are the center, rounded.

int8. A block of `BLOCK` numbers travels as its largest magnitude s, a float32, and as whole numbers q of -127 to 127,
rounded to nearest: x ≈ s·q/127. So a zero stays a zero, the largest number of a block stays exact, and a vector that
was cut once is cut to the same bytes again. A block with NaN or infinity has an s that is not finite, and is refused.

Feedback. Each replica keeps what its last push has lost, and adds it to the next one (1-bit SGD: Seide et al. 2014;
EF-SGD: Karimireddy et al. 2019). So all that arrived and the rest that is kept are together all that was pushed.
Gradients, gains and increments are cut as they are; of weights their difference to the center, as in float16.

Both ways (DoubleSqueeze: Tang et al. 2019). Behind a barrier all replicas know the same center, so the server tells
what has changed of it, cut in the same way; the feedback is the part of the center that they do not know yet. Without
a barrier each knows another one: it is given in float16, where an error ends with the step that is made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from daskcnn.frozen import frozen
from daskcnn.ps.messages import Code, Objection, Push, Vector
from daskcnn.ps.rule import Local, UpdateRule
from daskcnn.ps.vectors import wrong_shape

HALF: Final = "float16"
INT8: Final = "int8"
CODED: Final = np.dtype(np.uint8)
"""The dtype of a coded vector, which holds scales and whole numbers by their bytes."""
BLOCK: Final = 256
"""Numbers that share a scale."""
_SCALE, _MOST, _AT_ONCE = 4, 127, 256  # bytes of a scale; the largest whole number; blocks that stay in a cache


@frozen
class Wire:
    """The way of vectors between the replicas of a rule and its server.

    coded: pushes are coded vectors. changes: so are the answers to them, which are changes of the center. differences:
    pushes are not coded, and weights are pushed as their difference to the center that the replica was given. whole:
    the dtype of vectors that are not coded.
    """

    coded: bool
    changes: bool
    differences: bool
    whole: str

    @classmethod
    def of(cls, name: str, rule: UpdateRule) -> Wire:
        """The way by `cluster.wire`."""
        name = rule.wire(name)
        if name != INT8:  # without a barrier the center has moved on meanwhile; peers have increments of their own
            differences = name == HALF and rule.barrier and rule.answers == "center" and not rule.serverless
            return cls(coded=False, changes=False, differences=differences, whole=name)
        return cls(coded=True, changes=rule.barrier, differences=False, whole="float32" if rule.barrier else HALF)

    @property
    def unit(self) -> int:
        """Numbers that go to one range of a split server together."""
        return BLOCK if self.coded else 1

    @property
    def pushed(self) -> np.dtype[Any]:
        """The dtype of a push."""
        return CODED if self.coded else np.dtype(self.whole)

    def pushed_length(self, numbers: int) -> int:
        """The length of a push of this many numbers."""
        return coded_bytes(numbers) if self.coded else numbers

    def received(self, push: Push, center: Vector, rule: UpdateRule) -> Push:
        """The push with the payload that the rule is to merge into this center, a new one where it is not as it came.

        Its replica was given this very center: a merge behind a barrier is of all that were.
        """
        weights = rule.pushes_weights(push.pace)
        if not self.coded:
            return replace(push, payload=push.payload + center) if weights and self.differences else push
        payload = decode(push.payload, len(center), center.dtype)
        if weights:
            payload += center
        return replace(push, payload=payload)

    def answer_bytes(self, numbers: int) -> int:
        """The bytes of the answer to a push."""
        return coded_bytes(numbers) if self.changes else self.whole_bytes(numbers)

    def whole_bytes(self, numbers: int) -> int:
        """The bytes of a vector that is not coded."""
        return numbers * np.dtype(self.whole).itemsize


def bytes_of(wire: str, numbers: int) -> int:
    """The bytes of a push of this many numbers by `cluster.wire`."""
    return coded_bytes(numbers) if wire == INT8 else numbers * np.dtype(wire).itemsize


def numbers_of(wire: str, nbytes: int) -> int:
    """The numbers that a push of this many bytes has at most."""
    return nbytes // (_SCALE + BLOCK) * BLOCK if wire == INT8 else nbytes // np.dtype(wire).itemsize


def coded_bytes(numbers: int) -> int:
    """The bytes of a coded vector of this many numbers: the last block is filled up."""
    return -(-numbers // BLOCK) * (_SCALE + BLOCK)


def encode(vector: Vector, xp: Any = np) -> Vector:
    """The coded vector, (coded_bytes(n),), on the device of `xp`."""
    whole, left = divmod(len(vector), BLOCK)
    coded = xp.empty((whole + bool(left), _SCALE + BLOCK), CODED)
    at_once = _AT_ONCE if xp is np else max(1, whole)
    with np.errstate(invalid="ignore", over="ignore"):
        for lo in range(0, whole, at_once):
            hi = min(whole, lo + at_once)
            _cut(vector[lo * BLOCK : hi * BLOCK].reshape(-1, BLOCK), coded[lo:hi], xp)
        if left:
            rest = xp.zeros((1, BLOCK), vector.dtype)
            rest[0, :left] = vector[whole * BLOCK :]
            _cut(rest, coded[whole:], xp)
    return coded.reshape(-1)


def _cut(blocks: Vector, coded: Vector, xp: Any) -> None:
    """Write blocks, (n, BLOCK), as their scales and whole numbers, (n, _SCALE + BLOCK)."""
    scales = xp.abs(xp.maximum(blocks.max(axis=1), -blocks.min(axis=1))).astype(np.float32)  # no zero below zero
    coded[:, :_SCALE] = scales.view(CODED).reshape(-1, _SCALE)
    q = blocks / (scales + (scales == 0)).astype(blocks.dtype)[:, None]  # of a tiny scale 1 / s would overflow
    q *= _MOST
    coded[:, _SCALE:] = xp.rint(q, out=q).astype(np.int8).view(CODED)


def decode(coded: Vector, numbers: int, dtype: Any, xp: Any = np) -> Vector:
    """The vector of this many numbers that a coded one stands for, new."""
    rows = coded.reshape(-1, _SCALE + BLOCK)
    found = xp.empty((len(rows), BLOCK), dtype)
    at_once = _AT_ONCE if xp is np else max(1, len(rows))
    with np.errstate(invalid="ignore"):
        for lo in range(0, len(rows), at_once):
            part, own = rows[lo : lo + at_once], found[lo : lo + at_once]
            own[...] = part[:, _SCALE:].view(np.int8)
            own /= _MOST
            own *= _scales(part, xp).astype(dtype)[:, None]
    return found.reshape(-1)[:numbers]


def _scales(rows: Vector, xp: Any = np) -> Vector:
    return xp.ascontiguousarray(rows[:, :_SCALE]).view(np.float32).reshape(-1)


def misfit_of_coded(payload: Vector, numbers: int) -> Objection | None:
    """The reason why a coded payload is not of a center of this many numbers, or holds no numbers."""
    dtype = getattr(payload, "dtype", None)
    if dtype != CODED:
        return Objection(Code.DTYPE, f"dtype={dtype}: must be {CODED}; code it before pushing")
    if payload.shape != (coded_bytes(numbers),):
        return Objection(Code.LENGTH, wrong_shape(payload.shape, (coded_bytes(numbers),)))
    if not np.isfinite(_scales(payload.reshape(-1, _SCALE + BLOCK))).all():
        return Objection(Code.FINITE, "payload: holds NaN or infinity; lower the learning rate")
    return None


class Differences:
    """The arithmetic of exchanges by a rule whose replicas push weights as differences to what they were given."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule

    def pushed(self, local: Local) -> Vector:
        """Return what the rule pushes; of weights, in a new vector, the difference to the center."""
        vector = self._rule.pushed(local)
        return vector - local.base if self._rule.pushes_weights(local.pace) else vector

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Go on from the reply to a push, as the rule does."""
        self._rule.adopt(local, answer, version)


class Feedback:
    """A replica's pushes in int8, and what the last one has lost: the arithmetic of its exchanges.

    rule: what it is pushed by. xp: the namespace of the replica's arrays. A push counts once it is answered; what it
    has lost is then added to the next one. One that never is has lost nothing that others have. Between sessions, and
    in checkpoints, the rest is coded too.
    """

    def __init__(self, rule: UpdateRule, xp: Any = np) -> None:
        self._rule, self._xp = rule, xp
        self._kept: Vector | None = None
        self._left: Vector | None = None  # by the push that is not answered yet
        self._weights = False  # of which kind the last push was

    def begin(self, local: Local, rest: Vector | None) -> None:
        """Begin a session with what `rest` has kept of the one before; None: nothing."""
        like, xp = local.weights, self._xp
        self._kept = None if rest is None else decode(xp.asarray(rest), len(like), like.dtype, xp)
        self._left, self._weights = None, self._usually_weights

    @property
    def _usually_weights(self) -> bool:
        return self._rule.pushes_weights(None) and not self._rule.merges_gradients

    def rest(self) -> Vector | None:
        """The loss of all pushes so far, the last one included, coded. None: nothing, or of another kind."""
        kept = self._kept if self._left is None else self._left
        return None if kept is None or self._weights != self._usually_weights else encode(kept, self._xp)

    def pushed(self, local: Local) -> Vector:
        """The coded push."""
        vector, weights = self._rule.payload(local), self._rule.pushes_weights(local.pace)
        if weights:
            vector = vector - local.base
        if self._kept is not None and weights == self._weights:
            vector = vector + self._kept
        self._weights, coded = weights, encode(vector, self._xp)
        self._left = vector - decode(coded, len(vector), vector.dtype, self._xp)
        return coded

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Go on from the reply to a push, which may be a change of the center."""
        self._kept, self._left = self._left, None
        if answer.dtype == CODED:
            answer = local.base + decode(answer, len(local.base), local.base.dtype, self._xp)
        self._rule.adopt(local, answer, version)


def problems_with_int8(rule: UpdateRule, strategy: str) -> Iterator[str]:
    """Lines for a rule whose pushes cannot travel so: `cluster.wire = "int8"`: reason; remedy."""
    if rule.serverless:
        exchange = rule.exchange  # type: ignore[attr-defined] # a rule without a server has it
        yield (
            f'cluster.wire = "int8": replicas that meet peer to peer (rule.exchange = {exchange!r}) sum up parts '
            'without feedback; use "float16", or rule.exchange = "allreduce"'
        )
    elif rule.pushes_weights(None) and not rule.barrier:
        yield (
            f'cluster.wire = "int8": changes travel, and strategy {strategy!r} pushes weights to a center that has '
            'moved on meanwhile; use "float16", or a strategy such as local-sgd or bsp'
        )
