import pytest

from verifiers.exact import exact
from verifiers.numeric import numbers_backwards, numeric, read_number
from verifiers.spans import answer_span, boxed_span, last_line
from verifiers.verdict import Question, Verdict, VerdictStatus


def numeric_reward(reference: str | None, completion: str) -> float | None:
    return numeric(Question("task", "prompt", reference), completion).reward


@pytest.mark.parametrize(
    ("completion", "span"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer> 7\n</answer> done", "7"),
        ("<answer>1</answer> no, <answer>7</answer>", "7"),
        ("<answer>1 <answer>7</answer>", "7"),
        ("<answer>1</answer> and <answer>7", "1"),
        ("<answer></answer>", ""),
        ("</answer>7<answer>", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_span_counts(completion: str, span: str | None) -> None:
    assert answer_span(completion) == span


@pytest.mark.parametrize(
    ("completion", "span"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_boxed_braces_balance(completion: str, span: str | None) -> None:
    assert boxed_span(completion) == span


def test_last_line_skips_blanks() -> None:
    assert last_line("a\nb \n\n  ") == "b"
    assert last_line(" \n ") == ""


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("seven", 1.0),
        (" seven\n", 1.0),
        ("<think>eight?</think><answer>seven</answer>", 1.0),
        ("Seven", 0.0),
        ("seven.", 0.0),
        ("seven eight", 0.0),
        ("<answer>seven</answer><answer>eight</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_exact(completion: str, reward: float) -> None:
    assert exact(Question("task", "prompt", "seven"), completion) == reward


def test_without_a_reference_there_is_no_reward() -> None:
    verdict = exact(Question("task", "prompt"), "seven")
    assert isinstance(verdict, Verdict) and verdict.status is VerdictStatus.UNSCORABLE
    for reference in (None, "", "seven", "1 or 2", "1/0"):
        verdict = numeric(Question("task", "prompt", reference), "7")
        assert verdict.status is VerdictStatus.UNSCORABLE
        assert verdict.reward is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", [7]),
        ("-7 +7 \u22127", [-7, 7, -7]),
        ("5-3", [5, 3]),
        ("5 - 3", [5, 3]),
        ("x-3 (2)-1", [3, 2, 1]),
        ("(-3)", [-3]),
        ("1,234 1,234,567.5 -1,234", [1234, 1234567.5, -1234]),
        ("1,23 1,2345 1234,567", [1, 23, 1, 2345, 1234, 567]),
        ("1{,}234 1\\,234 1\u202f234 1\u00a0234", [1234] * 4),
        ("0.5 .5 5. 1.25e2 1e-1 1E+2", [0.5, 0.5, 5, 125, 0.1, 100]),
        ("3/4 -3/4 3 / 4", [0.75, -0.75, 0.75]),
        (r"\frac{3}{4} -\dfrac{3}{4} 1\frac{3}{4}", [0.75, -0.75, 1.75]),
        ("1 3/4", [1.75]),
        ("50% -12.5 % 50\\%", [0.5, -0.125, 0.5]),
        ("$5 -$5 $-5 \\$5", [5, -5, -5, 5]),
        ("5kg 5th x2 H2O v_1", [5, 5]),
        ("1/0 7", [7]),
        ("9" * 101, []),
        ("1e9999", []),
        ("no number, ½ or ٣", []),
        ("", []),
    ],
)
def test_how_numbers_are_written(text: str, values: list[float]) -> None:
    found = [float(number.value) for number in numbers_backwards(text)]
    assert found[::-1] == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 3, then 7.", 7),
        ("3 + 4 = 7", 7),
        ("#### 7", 7),
        ("5 #### 7 apples", 7),
        ("<answer>7</answer> or 8", 7),
        ("<answer>about 7 kg</answer>", 7),
        ("<answer>3 + 4 = 7</answer>", 7),
        (r"\boxed{7}, not 8", 7),
        (r"<answer>\boxed{7}</answer>", 7),
        ("<answer>6 7</answer>", None),
        ("<answer>6, 7</answer>", None),
        ("<answer></answer> 7", None),
        (r"\boxed{6, 7}", None),
        ("#### ", None),
        ("", None),
    ],
)
def test_which_number_is_the_answer(text: str, value: float | None) -> None:
    number = read_number(text)
    assert (None if number is None else number.value) == value


@pytest.mark.parametrize(
    ("reference", "completion", "reward"),
    [
        ("7", "7", 1.0),
        ("7", "7.0", 1.0),
        ("7", "8", 0.0),
        ("7", "-7", 0.0),
        ("7", "6.9999999", 0.0),
        ("1,234", "1234", 1.0),
        ("10000000", "10000001", 0.0),
        ("So it is #### 72", "72", 1.0),
        ("1/3", "0.3333333", 1.0),
        ("1/3", "0.33", 0.0),
        ("0.5", "1/2", 1.0),
        ("0.5", "50%", 1.0),
        ("50%", "0.5", 1.0),
        ("50%", "50", 1.0),
        ("50", "50%", 1.0),
        ("0.5", "0.5%", 0.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("0", "0", 1.0),
        ("0", "0.0000001", 0.0),
        ("7", "no idea", 0.0),
        ("7", "", 0.0),
        ("7", "1 2 3 4 5 6 7 8 9", 0.0),
        ("7", "<answer>1 2 3 4 5 6 7</answer>", 0.0),
    ],
)
def test_numeric(reference: str, completion: str, reward: float) -> None:
    assert numeric_reward(reference, completion) == reward


@pytest.mark.parametrize(
    "filler", ["1,234", "1", "1 ", "1/1", "1 2/", "-+", ",111", "<answer>", r"\boxed{", r"\frac{1}"]
)
def test_long_completions_are_read_without_backtracking(filler: str) -> None:
    assert numeric_reward("7", filler * 20_000) == 0.0
