"""What a dashboard and its panels are, and PromQL's idioms. `$run` stands for the chosen runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One graph (or, with `stat`, one figure)."""

    title: str
    queries: dict[str, str]
    """Legend → expression."""
    reading: str
    unit: str = "short"
    stat: bool = False
    condition: str = ""
    """When there is no data although all is well; empty if there always is some in a live run."""


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def metric(name: str, *matchers: str) -> str:
    """The series of one of our metrics for the chosen runs."""
    chosen = ", ".join(('run=~"$run"', *matchers))
    return f"slipstream_{name}{{{chosen}}}"


def rate(name: str, *matchers: str) -> str:
    """Per second, over five minutes, of a counter."""
    return f"rate({metric(name, *matchers)}[5m])"


def quantile(share: float, name: str, *labels: str) -> str:
    """Of a histogram, over five minutes, by `labels`."""
    by = ", ".join(("le", "run", *labels))
    return f"histogram_quantile({share}, sum by ({by}) ({rate(name + '_bucket')}))"
