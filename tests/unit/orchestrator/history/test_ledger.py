"""The ledger: lifecycle, conservation in samples and tokens, replay."""

import copy
import json
from dataclasses import dataclass, field

import pytest
from flows import ListJournal
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.history.ledger import Ledger
from orchestrator.history.ledger_counts import LENGTH_EDGES, LengthHistogram
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    GroupState,
    LedgerError,
    Ready,
    Retried,
    Stepped,
    Transition,
    Verified,
    consumed_batch,
)


@dataclass(frozen=True)
class Outcome:
    """What a learner reports of one sample."""

    sample_id: str
    trained_tokens: int
    masked: dict[str, int] = field(default_factory=dict)


def state(ledger: Ledger) -> dict:
    """Everything a ledger knows."""
    return {k: copy.deepcopy(v) for k, v in vars(ledger).items() if k != "_journal"}


def to_ready(ledger: Ledger, group: int, lengths=(3, 5), attempt: int = 0) -> None:
    ledger.apply(
        Generated(group, attempt, lengths), Verified(group, attempt), Ready(group, attempt)
    )


def with_ready(*groups: int, lengths=(3, 5)) -> Ledger:
    ledger = Ledger()
    for group in groups:
        ledger.apply(Admitted(group, f"task-{group}", len(lengths)))
        to_ready(ledger, group, lengths)
    return ledger


def samples_and_tokens(ledger: Ledger, name: str) -> tuple[int, int]:
    report = ledger.check()
    return getattr(report.samples, name), getattr(report.tokens, name)


# Fates


def test_a_group_moves_through_its_states_and_is_pending_until_it_ends():
    ledger = Ledger()
    states = []
    for transition in (
        Admitted(0, "task", 2),
        Generated(0, 0, (3, 5)),
        Verified(0, 0),
        Ready(0, 0),
    ):
        ledger.apply(transition)
        states.append(ledger.group(0).state)
    assert states == list(GroupState)
    assert samples_and_tokens(ledger, "pending") == (2, 8)
    assert ledger.report().in_flight_by_state["ready"] == 1
    ledger.apply(Consumed(0, 0, 1, (3, 5), ({}, {})))
    assert ledger.group(0) is None
    assert samples_and_tokens(ledger, "pending") == (0, 0)
    assert samples_and_tokens(ledger, "trained") == (2, 8)


def test_tokens_count_by_their_own_fate_and_samples_by_whether_any_token_trained():
    ledger = with_ready(0, lengths=(10, 4, 6, 0))
    masked = ({"stale": 7}, {"truncated": 1, "stale": 3}, {"truncated": 3, "stale": 3}, {})
    ledger.apply(Consumed(0, 0, 1, (3, 0, 0, 0), masked))
    report = ledger.check()
    assert (report.samples.trained, report.tokens.trained) == (1, 3)
    assert report.tokens.masked_by_reason == {"stale": 13, "truncated": 4}
    assert report.samples.masked_by_reason == {"stale": 2, "empty": 1}
    assert report.tokens.generated == 20


def test_dropped_and_retried_and_failed_samples_are_counted_by_reason():
    ledger = with_ready(0, 1, 2)
    ledger.apply(Dropped(0, "zero_variance"), Retried(1, "store_lost", "the store went away"))
    to_ready(ledger, 1, (2, 2), attempt=1)
    ledger.apply(Failed(2, "verifier_lost"))
    report = ledger.check()
    assert report.samples.dropped_by_reason == {"zero_variance": 2, "verifier_lost": 2}
    assert report.samples.superseded_by_reason == {"store_lost": 2}
    assert report.tokens.superseded_by_reason == {"store_lost": 8}
    assert (report.samples.generated, report.tokens.generated) == (8, 28)
    assert (report.samples.pending, report.tokens.pending) == (2, 4)
    assert (report.failed_tasks, report.failed_by_reason) == (1, {"verifier_lost": 1})


def test_a_task_that_never_produced_a_sample_is_apart_from_the_balance():
    ledger = Ledger()
    ledger.apply(Admitted(0, "task", 2), Retried(0, "worker_lost"), Failed(0, "worker_lost"))
    report = ledger.check()
    assert report.failed_tasks == 1
    assert report.samples.generated == report.samples.dropped == 0


def test_the_report_as_json_has_the_counts_in_samples_and_in_tokens():
    ledger = with_ready(0, 1, 2)
    ledger.apply(Consumed(0, 0, 1, (3, 1), ({}, {"stale": 4})), Dropped(1, "stale"))
    ledger.apply(Admitted(3, "task-3", 2), Failed(3, "engine_error"))
    report = json.loads(json.dumps(ledger.report().as_dict()))
    counts = {"generated": 6, "trained": 2, "masked": 0, "dropped": 2, "superseded": 0}
    assert {name: report[name] for name in counts} == counts
    assert (report["pending"], report["failed_tasks"], report["balanced"]) == (2, 1, True)
    assert report["dropped_by_reason"] == {"stale": 2}
    assert report["failed_by_reason"] == {"engine_error": 1}
    tokens = {"generated": 24, "trained": 4, "masked": 4, "dropped": 8, "pending": 8}
    assert {name: report["tokens"][name] for name in tokens} == tokens
    assert report["tokens"]["masked_by_reason"] == {"stale": 4}


def test_lengths_are_counted_for_what_was_generated_and_for_each_fate():
    ledger = with_ready(0, 1, lengths=(3, 100))
    ledger.apply(Consumed(0, 0, 1, (3, 0), ({}, {"truncated": 100})), Dropped(1, "stale"))
    lengths = ledger.report().lengths
    assert lengths["generated"] == {"4": 2, "128": 2}
    assert lengths["trained"] == {"4": 1}
    assert lengths["masked"] == {"128": 1}
    assert lengths["dropped"] == {"4": 1, "128": 1}
    assert lengths["superseded"] == {}


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, "0"), (1, "1"), (2, "2"), (3, "4"), (4, "4"), (5, "8")]
)
def test_length_buckets_include_their_upper_bound(tokens, bucket):
    histogram = LengthHistogram()
    histogram.add(tokens)
    assert histogram.as_dict() == {bucket: 1}


def test_lengths_beyond_the_last_bucket_are_kept():
    histogram = LengthHistogram()
    histogram.add(LENGTH_EDGES[-1])
    histogram.add(LENGTH_EDGES[-1] + 1)
    assert histogram.as_dict() == {str(LENGTH_EDGES[-1]): 1, "inf": 1}


# Refusals


ILLEGAL = [
    (Admitted(0, "again", 2), r"Admitted of group 0: ids below 4 are in use"),
    (Admitted(9, "none", 0), r"at least one sample"),
    (Generated(0, 0, (1, 1)), r"group 0: the group is ready, expected admitted"),
    (Generated(3, 0, (1,)), r"Generated of group 3: expected 2 lengths"),
    (Generated(3, 0, (1, -1)), r"expected 2 lengths"),
    (Generated(3, 1, (1, 1)), r"the group is at attempt 0"),
    (Verified(3, 0), r"Verified of group 3: the group is admitted, expected generated"),
    (Ready(3, 0), r"the group is admitted, expected verified"),
    (Ready(0, 0), r"the group is ready, expected verified"),
    (Consumed(3, 0, 2, (1, 1), ({}, {})), r"the group is admitted, expected ready"),
    (Consumed(0, 1, 2, (3, 5), ({}, {})), r"the group is at attempt 0"),
    (Consumed(0, 0, 0, (3, 5), ({}, {})), r"version 1 has consumed groups already"),
    (Consumed(0, 0, 2, (3,), ({},)), r"expected the fates of 2 samples"),
    (Consumed(0, 0, 2, (3, 4), ({}, {})), r"sample 1 has 5 tokens, but 4 trained and {} masked"),
    (Consumed(0, 0, 2, (3, 6), ({}, {"stale": -1})), r"sample 1 has 5 tokens"),
    (Consumed(0, 0, 2, (3, 4), ({}, {"Too old!": 1})), r"'Too old!' is no short code"),
    (Dropped(3, "stale"), r"Dropped of group 3: it has no samples to drop"),
    (Dropped(0, "worker-1: it died"), r"is no short code"),
    (Retried(0, ""), r"is no short code"),
    (Failed(0, "Oops"), r"is no short code"),
    (Consumed(1, 0, 2, (3, 5), ({}, {})), r"group 1 has ended already"),
    (Dropped(2, "stale"), r"group 2 has ended already"),
    (Retried(7, "worker_lost"), r"group 7 was not admitted"),
    (Verified(-1, 0), r"group -1 was not admitted"),
    (Stepped(2, 1, 0, 9, ()), r"step 2 to version 1 cannot follow step 0 at version 1"),
    (Stepped(1, 2, 0, 9, ()), r"step 1 to version 2 cannot follow step 0 at version 1"),
]


@pytest.mark.parametrize(("transition", "message"), ILLEGAL)
def test_illegal_transitions_are_refused_and_change_nothing(transition, message):
    """Group 0 is ready, 1 was consumed, 2 was dropped, 3 is admitted."""
    ledger = with_ready(0, 1, 2)
    ledger.apply(Consumed(1, 0, 1, (3, 5), ({}, {})), Dropped(2, "stale"), Admitted(3, "task-3", 2))
    before = state(ledger)
    with pytest.raises(LedgerError, match=message):
        ledger.apply(transition)
    assert state(ledger) == before


def test_an_id_that_was_skipped_is_not_admitted_later():
    with pytest.raises(LedgerError, match="ids below 5 are in use"):
        with_ready(0, 1, 4).apply(Admitted(3, "task-3", 2))


def test_a_late_answer_of_a_superseded_attempt_is_refused():
    ledger = Ledger()
    ledger.apply(Admitted(0, "task", 2), Generated(0, 0, (3, 5)), Retried(0, "worker_lost"))
    with pytest.raises(LedgerError, match="attempt 1"):
        ledger.apply(Verified(0, 0))
    with pytest.raises(LedgerError, match="attempt 1"):
        ledger.apply(Generated(0, 0, (3, 5)))
    to_ready(ledger, 0, attempt=1)
    assert samples_and_tokens(ledger, "superseded") == (2, 8)


# Journal


def test_the_journal_gets_what_was_accepted_one_call_at_a_time():
    journal = ListJournal()
    ledger = Ledger(journal)
    ledger.apply(Admitted(0, "a", 1), Admitted(1, "b", 1))
    with pytest.raises(LedgerError):
        ledger.apply(Generated(0, 0, (4,)), Verified(1, 0), Verified(0, 0))
    with pytest.raises(LedgerError):
        ledger.apply(Verified(1, 0))
    assert journal.calls == [
        [Admitted(0, "a", 1), Admitted(1, "b", 1)],
        [Generated(0, 0, (4,))],
    ]
    assert ledger.group(0).state is GroupState.GENERATED


def test_replaying_the_journal_gives_the_same_ledger():
    journal = ListJournal()
    ledger = Ledger(journal)
    for group in range(3):
        ledger.apply(Admitted(group, f"task-{group}", 2))
    ledger.apply(Retried(1, "worker_lost"))
    to_ready(ledger, 0), to_ready(ledger, 1, (9, 9), attempt=1)
    ledger.apply(Consumed(0, 0, 1, (3, 0), ({}, {"stale": 5})), Failed(2, "engine_error"))
    ledger.apply(Stepped(1, 1, 2, 10, ((0, 0),)))
    after = ListJournal()
    replayed = Ledger.replayed(journal.all, after)
    assert state(replayed) == state(ledger)
    assert (replayed.step, replayed.version, replayed.admitted) == (1, 1, 3)
    assert replayed.ready() == [(1, 1)]
    replayed.apply(Dropped(1, "stale"))
    assert after.all == [Dropped(1, "stale")], "the journal gets only what is new"


def test_a_history_that_cannot_have_been_is_refused():
    with pytest.raises(LedgerError, match="expected generated"):
        Ledger.replayed([Admitted(0, "a", 1), Verified(0, 0)])


# From the learner's report


def test_a_consumed_batch_is_made_of_the_learners_sample_reports_in_any_order():
    outcomes = [
        Outcome("7-1-1", 2),
        Outcome("5-0-0", 0, {"stale": 3}),
        Outcome("7-1-0", 4),
        Outcome("5-0-1", 5),
    ]
    assert consumed_batch(9, {5: 0, 7: 1}, outcomes) == [
        Consumed(5, 0, 9, (0, 5), ({"stale": 3}, {})),
        Consumed(7, 1, 9, (4, 2), ({}, {})),
    ]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["5-0-0", "6-0-0"], "sample 6-0-0 is not of the consumed batch"),
        (["5-1-0"], "sample 5-1-0 is not of the consumed batch"),
        (["5-0-0", "5-0-0"], "sample 5-0-0 was reported twice"),
        (["5-0-1"], r"fates of samples \[1\] only"),
        ([], r"fates of samples \[\] only"),
    ],
)
def test_a_report_that_does_not_fit_the_batch_is_refused(ids, message):
    with pytest.raises(LedgerError, match=message):
        consumed_batch(1, {5: 0}, [Outcome(sample_id, 1) for sample_id in ids])


# Always

EVENTS = (Admitted, Generated, Verified, Ready, Consumed, Dropped, Retried, Failed)


def event(ledger: Ledger, kind: type, group: int, number: int) -> Transition:
    """A transition of this kind, often a legal one."""
    live = ledger.group(group)
    attempt = live.attempt if live and number % 7 else number % 2
    lengths = live.response_tokens if live else ()
    if kind is Admitted:
        return Admitted(ledger.next_group, f"task-{number}", 2)
    if kind is Generated:
        return Generated(group, attempt, (number, number % 5))
    if kind in (Verified, Ready):
        return kind(group, attempt)
    if kind is Consumed:
        masked = tuple({"stale": length - length // 2} for length in lengths)
        return Consumed(group, attempt, 1, tuple(length // 2 for length in lengths), masked)
    return kind(group, "some_reason")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.integers(0, 40)), max_size=60)
)
def test_it_balances_after_every_transition_legal_or_not(events):
    journal = ListJournal()
    ledger = Ledger(journal)
    for kind, group, number in events:
        before = state(ledger)
        try:
            ledger.apply(event(ledger, kind, group, number))
        except LedgerError:
            assert state(ledger) == before
        else:
            assert state(ledger) != before
        ledger.check()
    assert state(Ledger.replayed(journal.all)) == state(ledger)
