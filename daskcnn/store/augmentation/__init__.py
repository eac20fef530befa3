"""The steps of augmentation, and lists of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator, SerializeAsAny, TypeAdapter

from daskcnn.errors import nearest
from daskcnn.store.augmentation.step import Chance, Moves, MovingStep, ShownSamples, Step, chances
from daskcnn.store.augmentation.steps import Crop, Cutout, Jitter, Mirror, Mixup, ResizedCrop, Translate
from daskcnn.store.dataset import Described

_KINDS: tuple[type[Step], ...] = (Crop, Translate, Mirror, Cutout, Jitter, ResizedCrop, Mixup)
STEPS = {kind.name: kind for kind in _KINDS}
AugmentName: TypeAlias = Literal["none", "crop-mirror"]
Augment: TypeAlias = AugmentName | tuple[SerializeAsAny[Step], ...]
"""A name that stands for steps, or the steps."""
NAMED: dict[AugmentName, tuple[Step, ...]] = {"none": (), "crop-mirror": (Crop(), Mirror())}


def steps_of(augment: Augment) -> tuple[Step, ...]:
    """Return the steps in their order."""
    return NAMED[augment] if isinstance(augment, str) else augment


def described(augment: Augment) -> str:
    """Return a line for people."""
    return augment if isinstance(augment, str) else ", then ".join(map(str, augment))


def read_augment(value: Any) -> Any:
    """Return a name as it is, and the steps of a list of tables. Raises ValueError for anything else."""
    if value is None or (isinstance(value, str) and value in NAMED):
        return value
    if not isinstance(value, list | tuple):
        names = " or ".join(map(repr, NAMED))
        raise ValueError(f'write {names}, or a list of steps such as [{{step = "crop"}}, {{step = "mirror"}}]')
    return tuple(_LISTED.validate_python(list(value)))


def _step(table: Any) -> Step:
    """Return the step that a table describes."""
    if isinstance(table, Step):
        return table
    if not isinstance(table, dict) or not isinstance(table.get("step"), str):
        raise ValueError(f"write a table with a key `step`, one of {', '.join(STEPS)}")
    name = table["step"]
    if name not in STEPS:
        raise ValueError(f"step {name!r}: there is none of this name{nearest(name, STEPS)}")
    kind, given = STEPS[name], {key: value for key, value in table.items() if key != "step"}
    if unknown := [key for key in given if key not in kind.model_fields]:
        raise ValueError(f"{unknown[0]}: {name} has no such key{nearest(unknown[0], kind.model_fields)}")
    return kind.model_validate(given)


_LISTED: TypeAdapter[list[Step]] = TypeAdapter(list[Annotated[Step, PlainValidator(_step)]])


def order_problems(augment: Augment) -> Iterator[str]:
    """Yield the problems of the steps' order, whatever the images, a line each: `place: reason; remedy`."""
    steps = steps_of(augment)
    for place, step in enumerate(steps[:-1]):
        if isinstance(step, Mixup):
            yield f"{place}: mixup mixes whole images with their labels, so it comes last; move it to the end"


def image_problems(augment: Augment, images: Described) -> Iterator[str]:
    """Yield the parameters that do not fit these images, a line each: `place.key = value: reason; remedy`."""
    for place, step in enumerate(() if isinstance(augment, str) else augment):
        yield from (f"{place}.{problem}" for problem in step.problems(images))


def with_chances(steps: Sequence[Step], samples: ShownSamples) -> list[tuple[Step, Chance]]:
    """Return each step with what its choices are made of."""
    return list(zip(steps, chances([step.draws for step in steps], samples), strict=True)) if steps else []


def first_move(
    steps: Sequence[tuple[Step, Chance]], shape: tuple[int, int]
) -> tuple[Moves, Sequence[tuple[Step, Chance]]]:
    """Return the moves that come first, as one as far as that goes, and the steps that are left."""
    move, done = None, 0
    for step, chance in steps:
        if not isinstance(step, MovingStep):
            break
        own = step.move(chance, shape)
        both = own if move is None else move.then(own)
        if both is None:
            break
        move, done = both, done + 1
    return move or Moves(), steps[done:]
