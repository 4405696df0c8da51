r"""Numeric answers, compared as exact fractions.

Which number is read
- the last `<answer>` span; else the last `\boxed{…}`; else what follows the last `####`. Such a
  span must hold one number, words and units aside; of an equation only what follows the last `=`
  counts. Several numbers are no answer, whichever of them is right.
- without any of these, the last number of the completion.

How a number is written
- sign: `+`, `-` or U+2212, touching the number or its currency sign and not following a word,
  digit or closing bracket: `5-3` holds 5 and 3.
- thousands: `,` `{,}` or a no-break or thin space before groups of exactly three digits. `1,23`
  is two numbers: decimal commas are not read.
- decimals `0.5`, `.5`; exponents of up to three digits, `1e-3`; fractions `3/4`, `\frac{3}{4}`;
  mixed numbers `1 3/4`, `1\frac{3}{4}`. Digits inside a word (`x2`) are no number, letters after
  one (`5kg`) are its unit. More than 100 characters are no number.
- percent: `50%` is 1/2. Where only one side has the sign and the reference exceeds 1 in
  magnitude, the sign may also be a mere unit: for the reference `50`, `50%` is right, and the
  other way round.

What is equal: an integer reference is matched exactly (`5.0` is 5, `4.9999999` is not), any other
within a relative 1e-6, so that `0.3333333` stands for 1/3 and `0.33` does not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from verifiers.registry import verifier
from verifiers.spans import answer_span, boxed_span
from verifiers.verdict import Question, Verdict

RELATIVE_TOLERANCE = Fraction(1, 10**6)
MAX_NUMBER_CHARACTERS = 100

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w)\]}}%.])[+-])? [$€£¥]? (?<!\w) (?<!\d\.)
    (?:(?P<whole>\d+)[ ](?=\d+/\d))? (?P<top>{_UNSIGNED})
    (?:[ ]?/[ ]?(?P<bottom>{_UNSIGNED}))? (?P<percent>[ ]?%)?""",
    re.VERBOSE | re.ASCII,
)
_HUGE_EXPONENT = re.compile(r"[eE][+-]?\d{4}")
_BEFORE_FRACTION = re.compile(r"(?<=\d)(?=\\[dt]?frac)")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}")
_SPACE_SEPARATOR = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
_PLAIN = {"\u2212": "-", "{,}": ",", "\\,": "", "\\!": "", "\\%": "%", "\\$": "$"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: `face` is what stands before a percent sign, if there is one."""

    face: Fraction
    percent: bool

    @property
    def value(self) -> Fraction:
        return self.face / 100 if self.percent else self.face


@verifier("numeric", isolated=False)
def numeric(question: Question, completion: str) -> Verdict:
    """1 if the completion's number equals the reference's, else 0; see the module's text.

    Unscorable where the reference does not hold exactly one readable number.
    """
    reference = _reference(question.answer or "")
    if reference is None:
        return Verdict.unscorable(f"numeric needs a number as reference, got {question.answer!r}")
    number = read_number(completion)
    if number is None:
        return Verdict.ok(0.0, outcome=0.0, detail="no single number found")
    right = float(same(number, reference))
    return Verdict.ok(right, outcome=right, detail="" if right else f"read {number.face}")


def read_number(text: str) -> Number | None:
    """The number that `text` gives as its answer, None without one."""
    span = _marked(text)
    numbers = numbers_backwards(text if span is None else span.rpartition("=")[2])
    last = next(numbers, None)
    return None if span is not None and next(numbers, None) is not None else last


def numbers_backwards(text: str) -> Iterator[Number]:
    """The numbers of `text`, from its last to its first."""
    for written, plain in _PLAIN.items():
        text = text.replace(written, plain)
    text = _BEFORE_FRACTION.sub(" ", _SPACE_SEPARATOR.sub(",", text))
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    for match in reversed(list(_NUMBER.finditer(text))):
        number = _number(match)
        if number is not None:
            yield number


def same(number: Number, reference: Number) -> bool:
    """Whether `number` answers a task whose reference is `reference`."""
    if _close(number.value, reference.value):
        return True
    unit_only = number.percent != reference.percent and abs(reference.face) > 1
    return unit_only and _close(number.face, reference.face)


def _reference(answer: str) -> Number | None:
    marked = _marked(answer)
    return read_number(f"<answer>{answer if marked is None else marked}</answer>")


def _marked(text: str) -> str | None:
    for span in (answer_span(text), boxed_span(text)):
        if span is not None:
            return span
    return text.rpartition("####")[2].strip() if "####" in text else None


def _number(match: re.Match[str]) -> Number | None:
    if len(match[0]) > MAX_NUMBER_CHARACTERS or _HUGE_EXPONENT.search(match[0]):
        return None
    face = Fraction(match["top"].replace(",", ""))
    if match["bottom"]:
        bottom = Fraction(match["bottom"].replace(",", ""))
        if bottom == 0:
            return None
        face /= bottom
    face += int(match["whole"] or 0)
    return Number(-face if match["sign"] == "-" else face, bool(match["percent"]))


def _close(number: Fraction, reference: Fraction) -> bool:
    if number == reference:
        return True
    if reference.denominator == 1:
        return False
    return abs(number - reference) <= RELATIVE_TOLERANCE * abs(reference)
