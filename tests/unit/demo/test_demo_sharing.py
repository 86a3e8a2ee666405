"""Two jobs in one run: each one's part of the guest's time, and what each got, from the records."""

from functools import partial
from pathlib import Path

import pytest

from bench.demo.plan import SHARING_S
from bench.demo.report.claims import DemoClaim, claims_of, exit_code
from bench.demo.report.measures import guest_leases, job_measures, sharing
from bench.demo.report.records import read_records
from bench.demo.report.report import events, verify, write_report
from tests.fakes.bench.demo_run import StandInRun

A, B = "frozen-lake-1", "frozen-lake-2"
EQUAL = ((A, 24.8), (B, 24.8), (A, 19.8), (B, 24.8), (A, 24.8))
# Few steps: they are the same in every run here.
shared = partial(StandInRun, quickstart=True, leased_speedup=0.3)
SHARE = "sharing: part of the guest's time that {} had"


def judged(folder: Path, run: StandInRun) -> dict[str, DemoClaim]:
    records = read_records(run.write(folder))
    return {claim.name: claim for claim in claims_of(records, 0)}


def test_equal_jobs_share_the_guest_and_every_claim_holds(tmp_path: Path) -> None:
    run = shared(leases=EQUAL)
    report = write_report(run.write(tmp_path))
    assert {claim.verdict for claim in report["verdicts"]} == {"HOLDS"}
    told = report["sharing"]
    assert (told["changes"], told["engine_starts"]) == (4, 0)
    assert told["change_s"] == 2.0
    assert [job["job"] for job in report["jobs"]] == [A, B]
    assert report["jobs"][1]["share"] == pytest.approx(49.6 / 119.0, abs=0.01)
    page = (tmp_path / "report.md").read_text()
    assert "2 training runs of equal weight" in page
    assert "![The job that had the guest" in page
    assert "went from one job to another 4 times" in page
    assert f"{B} had the guest for 50 s, 42% of its time" in " ".join(events(report))
    assert verify(tmp_path) == []


def test_two_jobs_of_one_name_for_everything_are_kept_apart(tmp_path: Path) -> None:
    claims = judged(tmp_path, shared(leases=EQUAL))
    for job in (A, B):
        assert claims[f"{job}: trajectories: lost or delivered twice"].value == 0
        assert claims[f"{job}: trajectories: staleness"].value == 1
        assert claims[f"{job}: borrowed tokens: logprob gap of guest"].verdict == "HOLDS"
    assert not any("dedicated" in name or "SIGKILL" in name for name in claims)


@pytest.mark.parametrize(
    ("run", "broken"),
    [
        (shared(leases=((A, 80.0), (B, 19.8), (A, 19.8))), SHARE.format(B)),
        (shared(leases=((A, 39.8), (B, 79.8))), SHARE.format(A)),
        (shared(leases=((A, 49.8), (B, 49.8))), "sharing: changes from one job to another"),
        (
            shared(leases=((A, 30.0), (B, 30.0), (A, 20.0))),
            "sharing: time in which a job had the guest",
        ),
        (shared(leases=EQUAL, new_engines=1), "sharing: engines started anew for that"),
        (shared(leases=EQUAL, lost=1), f"{B}: trajectories: lost or delivered twice"),
        (shared(leases=EQUAL, staleness=2), f"{A}: trajectories: staleness"),
    ],
    ids=["less", "more", "changes", "idle", "engines", "lost", "stale"],
)
def test_a_claim_of_sharing_fails_when_it_is_not_so(
    tmp_path: Path, run: StandInRun, broken: str
) -> None:
    claims = judged(tmp_path, run)
    assert claims[broken].verdict == "FAILS"
    assert exit_code(list(claims.values()), None) == 1


def test_time_counts_only_while_the_guest_is_lent_and_a_lease_that_lives_on_ends_with_it(
    tmp_path: Path,
) -> None:
    run = shared(leases=((A, 60.0), (B, 900.0)))
    records = read_records(run.write(tmp_path))
    [first, second] = guest_leases(records)
    [block] = records.blocks
    assert (first.start_s, second.end_s) == (block.start_s, block.end_s)
    assert sum(job["guest_s"] for job in job_measures(records)) <= block.duration_s
    assert block.duration_s == pytest.approx(SHARING_S, abs=5)


def test_a_run_of_one_job_says_nothing_of_sharing(tmp_path: Path) -> None:
    records = read_records(StandInRun().write(tmp_path))
    assert (records.jobs, job_measures(records), sharing(records)) == ([], [], None)
