"""The metrics reference is what the registries have, in few series, and says what bounds them."""

from typing import Any

import pytest
from operator_files import ROOT, script

from tests.harness.programs.prometheus import asked_by

reference = script("metrics_reference")


def test_the_page_is_current() -> None:
    [(path, text)] = reference.page().items()
    assert path.read_text(encoding="utf-8") == text, "run scripts/metrics-reference"


def test_names_say_their_units_and_what_only_grows() -> None:
    for family in reference.families():
        assert family.name.startswith("rose_"), family.name
        assert family.what.endswith("."), family.name
        ends = ("_seconds", "_bytes", "_ratio")
        if any(f"{end}_" in f"{family.name}_" for end in ends):
            units = (*ends, "_seconds_total", "_tokens_per_second")
            assert family.name.endswith(units), f"{family.name}: the unit comes last"


def test_no_label_holds_what_grows_without_end() -> None:
    never = {"request", "request_id", "session", "lease", "epoch", "url", "pid", "message"}
    used = {label for family in reference.families() for label in family.labels}
    assert not used & never
    assert used == set(reference.LABELS), "LABELS explains each label that is used, and no other"


def series(metrics: Any) -> int:
    return int(reference.series(reference.text_of(metrics.registry)))


def test_each_process_keeps_within_its_series() -> None:
    node = [series(reference.node_metrics(replicas)) for replicas in (0, 8)]
    assert node[0] <= 40
    assert node[1] - node[0] <= 8 * (reference.PER_GUEST + reference.PER_HOST)
    own = series(reference.scheduler_metrics(0, 0))
    assert own <= 200
    assert series(reference.scheduler_metrics(100, 0)) - own <= 100 * reference.PER_NODE
    assert series(reference.scheduler_metrics(0, 10)) - own <= 10 * reference.PER_JOB
    gateway = [reference.series(reference.gateway_text(replicas)) for replicas in (0, 100)]
    assert gateway[1] - gateway[0] <= 100 * reference.PER_REPLICA
    relay = [series(reference.relay_metrics(jobs)) for jobs in (0, 10)]
    assert relay[0] <= 40
    assert relay[1] - relay[0] == 2 * 10


def test_what_no_example_reaches_is_an_error() -> None:
    text = "# HELP rose_new_total Something.\n# TYPE rose_new_total counter\n"
    with pytest.raises(reference.NeverCountedError, match="rose_new"):
        list(reference._read("node", text))


def test_names_are_found_in_expressions() -> None:
    asked = asked_by(
        'sum by (job) (rate(a_total{x="}(", y=~"b"}[5m:1m] offset 1h)) > 2 and on (z) b:c'
    )
    assert asked.metrics == {"a_total": {"x", "y"}, "b:c": set()}
    assert asked.grouped == {"job", "z"}
    with pytest.raises(ValueError, match="brackets"):
        asked_by("sum(a")


def test_the_script_is_named_where_it_is_asked_for() -> None:
    assert (ROOT / "scripts" / "metrics-reference").stat().st_mode & 0o111
