"""What a checkpoint keeps as JSON beside its arrays: checked before anything goes on from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, ValidationError

from daskcnn.errors import DataError
from daskcnn.nn.score import Score
from daskcnn.partition import Allocation

_REMEDY = "take another checkpoint of the run"
_MOST_WORKERS = 100_000
Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _StateFields(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _Rounds(_StateFields):
    """The samples of each worker, and how often each was presented."""

    allocation: dict[str, Any]
    seconds: dict[str, PositiveFloat]
    numbers: dict[str, NonNegativeInt]
    left: Count


class _Book(_StateFields):
    """What the coordinator goes on from."""

    rounds: _Rounds | None = None
    server_epoch: Count = 0
    best: float = 0.0
    worse: Count = 0
    epochs: Count | None = None
    rate_scale: float = Field(1.0, gt=0, le=1)
    told: bool = False


class Record(_StateFields):
    """Everything but the images' description and the arrays.

    Attributes
    ----------
    epoch : presentations a sample so far, on average
    seconds : trained so far
    book : what the coordinator goes on from
    optimizer_steps : that the optimizer of each replica has made
    validation : summed loss, right answers (None where the loss knows none) and samples of the last look, and the
        answers a sample has if it has several; None where there was none
    """

    epoch: NonNegativeFloat
    seconds: NonNegativeFloat
    book: _Book
    optimizer_steps: dict[str, Count] = Field(default_factory=dict)
    validation: Annotated[list[float | None], Field(min_length=3, max_length=4)] | None

    @property
    def score(self) -> Score | None:
        """The last look at the validation samples."""
        if self.validation is None:
            return None
        loss, correct, samples, *more = self.validation
        answers = max(1, int(more[0] or 1)) if more else 1
        right = None if correct is None else int(correct)
        return Score(math.nan if loss is None else loss, right, int(samples or 0), answers=answers)

    @property
    def allocation(self) -> Allocation | None:
        """The samples of each worker; None where that was not kept. Raises ValueError where it is damaged."""
        return None if self.book.rounds is None else Allocation.from_dict(self.book.rounds.allocation)


def parse_record(state: Mapping[str, Any], path: Path | None) -> Record:
    """Return the record in a checkpoint's state. Raises DataError naming what is wrong with it."""
    where = "checkpoint" if path is None else path
    try:
        _check_count(state)
        record = Record.model_validate(state)
        if record.book.rounds is not None:
            _check_workers(record.book.rounds, record.allocation)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc'])):.80} = {first['input']!r:.60}: {first['msg']}"
        raise DataError(where, f"its state is damaged ({reason})", _REMEDY) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(where, f"its state is damaged ({error!s:.200})", _REMEDY) from error
    return record


def _check_count(state: Mapping[str, Any]) -> None:
    """Raise ValueError for tables with more workers than there can be: each entry could be an error."""
    book = state.get("book")
    rounds = book.get("rounds") if isinstance(book, Mapping) else None
    for table in rounds.values() if isinstance(rounds, Mapping) else ():
        if isinstance(table, Mapping) and len(table) > _MOST_WORKERS:
            raise ValueError(f"{len(table):,} workers, at most {_MOST_WORKERS:,}")


def _check_workers(rounds: _Rounds, allocation: Allocation | None) -> None:
    assert allocation is not None, "there are rounds"
    if not allocation.ranges.keys() == rounds.seconds.keys() == rounds.numbers.keys():
        raise ValueError("book.rounds: its tables are of different workers")
