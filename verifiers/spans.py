"""Finds the part of a completion that is meant as the answer."""


def answer_span(completion: str) -> str | None:
    """The trimmed text of the last complete `<answer>…</answer>`, None without one.

    The last one counts, so that listing several answers does not buy several chances. A tag
    left open is not a span.
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    return completion[start + len("<answer>") : end].strip()


def boxed_span(completion: str) -> str | None:
    r"""The content of the last `\boxed{…}` whose braces balance, None without one."""
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    first = start + len(r"\boxed")
    for position in range(first, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return completion[first + 1 : position].strip()
    return None


def last_line(completion: str) -> str:
    """The last line that is not blank, trimmed; empty for a blank completion."""
    return completion.strip().rpartition("\n")[2].strip()
