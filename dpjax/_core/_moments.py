"""Conversion of dates, times and durations to float64 numbers, and back.

The unit of the numbers is the same for all libraries and for all resolutions of a column.
"""

import dataclasses
import datetime
import math
from typing import Any, NamedTuple

import numpy as np

_NOTHING = np.iinfo(np.int64).min  # The integer by which NumPy represents a missing time.
# `_PER_SECOND`: how many of each short unit there are in one second. `_SECONDS`: the length of each
# longer unit (minute, hour, day, week) in seconds. Years and months are not supported, because
# their lengths vary.
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SECONDS = {"m": 60.0, "h": 3600.0, "D": 86400.0, "W": 604800.0}
_DAY = 86400.0
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _Unit(NamedTuple):
    """A unit in which the error of a date or time is printed.

    Attributes:
        name: the name of the unit.
        seconds: the length of the unit in seconds.
        resolution: the precision of the printed date or time, a NumPy code such as "m" for minutes.
        step: this precision in terms of the unit. It is 1/60 for minutes if the unit is hours.
    """

    name: str
    seconds: float
    resolution: Any
    step: float


_PRINTED = (
    _Unit("days", _DAY, "D", 1.0),
    _Unit("hours", 3600.0, "m", 1 / 60),
    _Unit("minutes", 60.0, "s", 1 / 60),
    _Unit("seconds", 1.0, "ms", 1e-3),
)


@dataclasses.dataclass(frozen=True)
class Moments:
    """How a column of dates, times or durations is converted to numbers, and back.

    Attributes:
        kind: "dates" become days since 1970-01-01, "times" become seconds since 1970-01-01 in UTC,
            and "durations" become seconds.
    """

    kind: str

    def number(self, moment: Any) -> float:
        """Converts a date, time or duration to a number, in the same way as the column.

        Numbers are returned unchanged. A time without a time zone counts as UTC. For a column of
        dates, a time becomes a fractional number of days.

        Raises:
            TypeError: if the moment is of another kind than the column, or in an unsupported unit.
        """
        if isinstance(moment, (np.datetime64, np.timedelta64)):
            if moments_of_numpy(moment.dtype) is None:
                raise TypeError(
                    "dates, times and durations must be in a unit of NumPy from weeks to"
                    f' nanoseconds, got {moment!r}: convert it, for example by .astype("M8[D]")'
                )
            (seconds,) = seconds_of(np.array([moment]))
            is_duration = isinstance(moment, np.timedelta64)
        elif isinstance(moment, datetime.timedelta):
            seconds, is_duration = _seconds(moment), True
        elif isinstance(moment, datetime.date):
            seconds, is_duration = _seconds(_since_1970(moment)), False
        else:
            return moment
        if is_duration != (self.kind == "durations"):
            raise TypeError(
                f"a column of {self.kind} can only be compared with {self.kind}, got {moment!r}"
            )
        return float(seconds) / (_DAY if self.kind == "dates" else 1)

    def moments(self, numbers: Any) -> np.ndarray:
        """Converts numbers to NumPy dates, or to NumPy times or durations in microseconds.

        NaN becomes NaT, NumPy's missing time.
        """
        numbers = np.asarray(numbers, np.float64)
        unit, per = ("D", 1.0) if self.kind == "dates" else ("us", 1e6)
        # Numbers are clipped, because larger ones would not fit into 64-bit integers.
        whole = np.clip(np.round(numbers * per), -(2.0**62), 2.0**62)
        known = ~np.isnan(whole)
        integers = np.where(known, np.where(known, whole, 0).astype(np.int64), _NOTHING)
        return integers.view(f"{'m' if self.kind == 'durations' else 'M'}8[{unit}]")

    def exact(self, numbers: np.ndarray) -> np.ndarray:
        """Converts numbers as `moments` does, but without rounding dates to days.

        The numbers of a column of dates become times.
        """
        if self.kind == "dates":
            return Moments("times").moments(numbers * _DAY)
        return self.moments(numbers)

    def with_reach(self, numbers: np.ndarray, reach: float, most: int) -> str:
        """Returns the text of numbers as dates, times or durations, plus or minus an error.

        Only the first `most` numbers are printed. `reach` is the largest error of all numbers.
        """
        reach *= _DAY if self.kind == "dates" else 1.0
        unit = next((unit for unit in _PRINTED if reach >= 2 * unit.seconds), _PRINTED[-1])
        first = numbers.ravel()[:most]
        if self.kind == "durations":
            texts, step = [f"{number / unit.seconds:.1f}" for number in first], 0.05
        else:
            times = self.exact(first)
            texts, step = np.datetime_as_string(times, unit=unit.resolution).tolist(), unit.step
        left_out = f" ...] of shape {numbers.shape}" if most < numbers.size else "]"
        shown = texts[0] if numbers.ndim == 0 else f"[{' '.join(texts)}{left_out}"
        # Printed times are truncated, and printed durations are rounded. This changes them by at
        # most `step`, so `step` is added to the printed error.
        return f"{shown} ± {math.ceil(10 * (reach / unit.seconds + step)) / 10:g} {unit.name}"


def is_moment(value: object) -> bool:
    """Whether a public value is a date, time or duration."""
    kinds = datetime.date, datetime.timedelta, np.datetime64, np.timedelta64
    return isinstance(value, kinds)


def _since_1970(moment: datetime.date) -> datetime.timedelta:
    if not isinstance(moment, datetime.datetime):
        moment = datetime.datetime(moment.year, moment.month, moment.day)
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _EPOCH


def _seconds(duration: datetime.timedelta) -> float:
    """Converts a duration to seconds, with the same rounding as `in_seconds`."""
    whole, rest = divmod(abs(duration) // datetime.timedelta(microseconds=1), 10**6)
    return math.copysign(whole + rest / 10**6, duration.days)


def moments_of_numpy(dtype: np.dtype) -> Moments | None:
    """Returns the `Moments` of a NumPy dtype of dates, times or durations.

    The result is None if the unit is not supported, such as months.
    """
    unit, count = np.datetime_data(dtype)
    if count != 1 or unit not in (*_PER_SECOND, *_SECONDS):
        return None
    if dtype.kind == "m":
        return Moments("durations")
    return Moments("dates" if unit in "DW" else "times")


def numbers_of_numpy(moments: Moments, array: np.ndarray) -> np.ndarray:
    """Converts a NumPy array of dates, times or durations to float64."""
    seconds = seconds_of(array)
    return seconds / _DAY if moments.kind == "dates" else seconds


def seconds_of(array: np.ndarray) -> np.ndarray:
    """Converts a NumPy array of times or durations to seconds."""
    unit, _ = np.datetime_data(array.dtype)
    integers = array.astype(array.dtype.newbyteorder("=")).view(np.int64)
    return in_seconds(integers, integers != _NOTHING, unit)


def in_seconds(integers: np.ndarray, known: np.ndarray, unit: str) -> np.ndarray:
    """Converts integers, in the unit `unit`, to seconds. Missing entries become NaN.

    Whole seconds and the remainder are converted separately. So the same time becomes the same
    float64 for all units.
    """
    per = 1 if unit in _SECONDS else _PER_SECOND[unit]
    rest = np.fmod(integers, per)
    seconds = ((integers - rest) // per + rest / per) * _SECONDS.get(unit, 1.0)
    return np.where(known, seconds, np.nan)
