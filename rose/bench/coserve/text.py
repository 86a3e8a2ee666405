"""The result as a page of text."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
_HEAD = (
    f"{'busy':>5} {'traffic':8} {'mode':12} {'share':>5} {'n':>6}"
    f" {'ttft p90':>9} {'× alone':>18} {'tpot p90':>9} {'× alone':>18}"
    f" {'attain':>7} {'guest/s':>8} {'idle eff':>8} {'spare eff':>9}"
    f" {'pressed':>7} {'kv MiB':>6}  verdict"
)


def render(result: dict[str, Any]) -> str:
    """One line a row, then what the run says as a whole."""
    lines = [_HEAD, *(_line(row) for row in result["rows"]), ""]
    for row in result["rows"]:
        failed = [c for c in row["checks"] if c["decisive"] and c["verdict"] == "FAILS"]
        lines += [
            f"{row['mode']} {row['slack_share']} at {row['busy_target']} {row['traffic']}:"
            f" {c['name']} {_number(c['value'], 3)} against {_number(c['limit'], 3)}"
            for c in failed
        ]
    run = result["run"]
    lines += [
        "",
        f"targets TTFT {run['ttft_target_s']:.3f} s, TPOT {run['tpot_target_s']:.4f} s"
        f" ({run['targets_from']})",
        f"capacity {run['capacity_rps']:.1f} requests/s; all engines on one CPU core",
        "naive co-location harms the host: "
        + ("yes" if result["danger"] == "FAILS" else "not shown, so nothing is proved"),
        f"verdict of all rows with a ROSE guest: {result['verdict']}",
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    host, ci95, ratio = row["host"], row["ratio_to_alone_ci95"], row["ratio_to_alone"]
    share = "" if row["slack_share"] is None else f"{row['slack_share']:.1f}"
    return (
        f"{row['busy']:5.2f} {row['traffic']:8} {row['mode']:12} {share:>5}"
        f" {host['requests']:6d} {_number(host['ttft_p90_s'], 4):>9}"
        f" {_ratio(ratio['ttft_p90'], ci95['ttft_p90']):>18} {_number(host['tpot_p90_s'], 4):>9}"
        f" {_ratio(ratio['tpot_p90'], ci95['tpot_p90']):>18} {host['attainment']:7.4f}"
        f" {row['guest_tok_s']:8.1f} {_number(row['idle_efficiency'], 2):>8}"
        f" {_number(row['spare_efficiency'], 2):>9} {_number(row['host_kv_pressed'], 2):>7}"
        f" {_number(_mib(row['guest_kv_bytes']), 1):>6}  {row['verdict']}"
    )


def _mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, ci95: Sequence[float | None] | None) -> str:
    if ci95 is None:
        return _number(value, 2)
    return f"{_number(value, 2)} [{_number(ci95[0], 2)}, {_number(ci95[1], 2)}]"
