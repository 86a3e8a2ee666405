import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.replica.admission import Admission, QuarantinedError, StaleEpochError


def test_a_replica_starts_closed() -> None:
    assert not Admission().open


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_only_the_newest_epoch_is_obeyed(commands: list[tuple[bool, int]]) -> None:
    admission, newest, expected = Admission(), 0, False
    for opens, epoch in commands:
        stale = epoch < newest
        try:
            if opens:
                admission.admit(epoch)
            else:
                admission.close(epoch, "")
        except StaleEpochError:
            assert stale
        else:
            assert not stale
            newest, expected = epoch, opens
        assert (admission.open, admission.epoch) == (expected, newest)


def test_a_quarantined_replica_never_opens_again() -> None:
    admission = Admission()
    admission.admit(1)
    admission.quarantine("unproven")
    with pytest.raises(QuarantinedError, match="unproven"):
        admission.admit(2)
    admission.close(3, "drained")
    assert not admission.open
    assert admission.reason == "unproven"


def test_turns_of_another_job_than_the_leases_are_not_taken() -> None:
    admission = Admission()
    admission.admit(1, "a")
    assert [admission.takes(job) for job in ("a", "b", "")] == [True, False, True]
    admission.admit(2, "b")
    assert not admission.takes("a")
    # A lease may name no job, as where nobody says which jobs there are.
    admission.admit(3)
    assert admission.takes("a")
