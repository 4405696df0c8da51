import asyncio
import math

import numpy as np
import pytest
import verifier_doubles  # noqa: F401  registers the doubles

from verifiers.registry import Verifier, resolve
from verifiers.scoring import check, score_blocking, score_inline
from verifiers.verdict import Question, Verdict, VerdictStatus
from verifiers.wire import decode_verdict, encode_verdict

QUESTION = Question("task", "prompt", "right")
PLAIN = Verifier("plain", "here:plain", target=lambda question, completion: completion)


def inline(name: str, completions: list[str], deadline_s: float = 60.0) -> list[Verdict]:
    return asyncio.run(score_inline(resolve(name), QUESTION, completions, deadline_s))


@pytest.mark.parametrize("result", [1, 1.0, True, np.float32(1.0), np.float64(1.0), np.int64(1)])
def test_real_numbers_are_rewards_and_outcomes(result: object) -> None:
    verdict = check(PLAIN, result)
    assert verdict.status is VerdictStatus.OK
    assert (verdict.reward, verdict.outcome) == (1.0, 1.0)
    assert type(verdict.reward) is float


@pytest.mark.parametrize("result", ["1", None, [1.0], np.ones(1), 1j, object(), {"right": 1.0}])
def test_other_types_are_errors(result: object) -> None:
    verdict = check(PLAIN, result)
    assert (verdict.status, verdict.reward) == ("error", None)
    assert "'plain'" in verdict.detail


def test_rewards_stay_in_the_declared_range() -> None:
    verdicts = inline("double_range", ["-1", "0", "-0.5", "0.5", "-2", "nan"])
    assert [verdict.reward for verdict in verdicts] == [-1.0, 0.0, -0.5, None, None, None]
    assert "not in [-1, 0]" in verdicts[3].detail


def test_parts_are_weighted_and_none_may_be_missing() -> None:
    right, wrong, missing = inline("double_parts", ["right", "wrong", "missing"])
    assert (right.reward, wrong.reward) == (1.0, 0.25)
    assert wrong.parts == {"format": 1.0, "right": 0.0}
    assert wrong.outcome is None
    assert missing.status == "error"
    assert "parts ['right'], but weights ['format', 'right']" in missing.detail


def test_a_group_must_get_as_many_results_as_it_has_completions() -> None:
    assert [v.reward for v in inline("double_group", ["a", "bb", "c"])] == [0.0, 1.0, 0.0]
    for completions in (["a", "short"], ["a", "one", "c"]):
        verdicts = inline("double_group", completions)
        assert [verdict.status for verdict in verdicts] == ["error"] * len(completions)
        assert f"for {len(completions)} completions" in verdicts[0].detail
        assert "'double_group'" in verdicts[0].detail


def test_one_bad_result_of_a_group_spoils_no_other() -> None:
    verdicts = inline("double_group", ["a", "bad", "c"])
    assert [verdict.reward for verdict in verdicts] == [1.0, None, 1.0]


def test_an_async_verifier_is_stopped_at_its_deadline() -> None:
    verdicts = inline("double_async", ["never"], deadline_s=0.05)
    assert [verdict.status for verdict in verdicts] == ["timeout"]
    verdicts = inline("double_async", ["right", "wrong"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]


def test_a_timeout_that_the_verifier_raises_is_its_own_error() -> None:
    def raises(question: Question, completion: str) -> float:
        raise TimeoutError("the endpoint is slow")

    target = Verifier("endpoint", "here:endpoint", raises)
    [verdict] = asyncio.run(score_inline(target, QUESTION, ["x"], 60.0))
    assert verdict.status == "error"
    [[verdict]] = score_blocking(target, QUESTION, ["x"])
    assert verdict.status == "error"
    assert "raised TimeoutError: the endpoint is slow (test_scoring.py:" in verdict.detail


@pytest.mark.parametrize(
    "fields",
    [
        (None, None, {}, VerdictStatus.OK),
        (0.0, None, {}, VerdictStatus.ERROR, "why"),
        (None, None, {}, VerdictStatus.TIMEOUT),
        (math.nan, None, {}, VerdictStatus.OK),
        (math.inf, None, {}, VerdictStatus.OK),
        (1.0, math.nan, {}, VerdictStatus.OK),
        (1.0, 1.0, {"format": math.nan}, VerdictStatus.OK),
        ("1", None, {}, VerdictStatus.OK),
        (1.0, None, {}, "fine"),
    ],
)
def test_contradictory_verdicts_cannot_be_made(fields: tuple) -> None:
    with pytest.raises((ValueError, TypeError)):
        Verdict(*fields)


def test_verdicts_survive_the_wire() -> None:
    for verdict in (
        Verdict.ok(0.5, outcome=1.0, parts={"a": 0.25}, detail="half"),
        Verdict.failed(VerdictStatus.TIMEOUT, "late", 2.5),
        Verdict.unscorable("no reference"),
    ):
        assert decode_verdict(encode_verdict(verdict)) == verdict


def test_details_are_short_and_can_be_written_as_utf8() -> None:
    detail = Verdict.unscorable("\ud800" + "x" * 10_000).detail
    assert len(detail) == 500
    assert detail.encode().startswith(b"?x")
