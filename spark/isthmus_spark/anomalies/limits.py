"""From when on something is an anomaly; each can be set (``--set slow_times=8``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


class BadLimit(Exception):
    """A limit that does not exist, or a value that it cannot have; says what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Times are event times."""

    window_s: int = 10
    """What is judged are the last so many seconds."""
    repeat_s: int = 60
    """An alert about the same subject is repeated after this time if it goes on."""
    usual_s: int = 150
    """What is usual is forgotten with this half-life."""
    usual_requests: int = 100
    """With fewer requests before the window nothing is known of what is usual."""
    slow_requests: int = 20
    slow_ms: int = 100
    slow_times: float = 4.0
    """A broker is slow when one in ten of so many requests takes so long, and so many times as long as others'."""
    gate_requests: int = 10
    gate_ms: int = 1000
    gate_times: float = 5.0
    error_requests: int = 20
    error_share: float = 0.2
    """So many errors that are so large a part of what a client asks of an API are a burst."""
    batches_kept: int = 8
    """Of each producer in each partition, to compare the next ones with: more than can be in flight."""
    producers_kept: int = 1000
    """In each partition; those that sent nothing for longest are forgotten."""

    @classmethod
    def chosen(cls, settings: Iterable[str]) -> Limits:
        """From ``name=value``. Raises BadLimit."""
        kinds: dict[str, type[int] | type[float]] = {
            field.name: type(getattr(cls(), field.name)) for field in fields(cls)
        }
        values: dict[str, int | float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in kinds:
                raise BadLimit(f"there is no limit {name!r}: choose from {', '.join(kinds)}")
            try:
                values[name] = kinds[name](text)
            except ValueError:
                raise BadLimit(f"{setting!r}: {text!r} is not {_A[kinds[name]]}") from None
            if values[name] <= 0:
                raise BadLimit(f"{setting!r}: it has to be more than 0")
        return cls(**values)  # type: ignore[arg-type]

    def texts(self) -> list[str]:
        return [f"{name}={value}" for name, value in asdict(self).items()]


_A = {int: "a whole number", float: "a number"}
