"""Which segments of the trajectory log are needed, and until when."""

from orchestrator.history.retention import Retention


def test_a_segment_is_needed_by_what_is_on_its_way_and_by_steps_after_the_checkpoint() -> None:
    retention = Retention()
    for group_id, segment in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2)):
        retention.kept(group_id, segment)
    retention.left(0, 5)
    assert retention.release(9) == [], "group 1 is on its way"
    retention.left(1, 7)
    assert retention.release(6) == [], "step 7 would have to be done again"
    assert retention.release(7) == [0]
    assert retention.release(7) == []
    retention.left(2, None), retention.left(3, 8)
    assert retention.release(8) == [1]
    retention.left(4, 9)
    assert retention.release(99) == [], "the newest segment may be being written"


def test_a_group_that_is_stored_twice_counts_once() -> None:
    retention = Retention()
    retention.kept(0, 0)
    retention.kept(0, 1)
    retention.kept(1, 2)
    retention.left(0, 3)
    assert retention.release(3) == [0, 1]


def test_groups_that_never_became_ready_are_nothing_to_it() -> None:
    retention = Retention()
    retention.left(5, None)
    assert retention.release(0) == []
