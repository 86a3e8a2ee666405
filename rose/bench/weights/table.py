"""The result as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(result: Mapping[str, Any]) -> str:
    """All of it, the figures on paper for one link."""
    schemes = list(result["synthetic"][0]["bytes_per_change"])
    blocks = [
        _block(
            "Bytes for each changed weight, synthetic bf16 steps",
            ["density", *schemes],
            [
                [f"{row['density']:.2%}", *(f"{row['bytes_per_change'][s]:.3f}" for s in schemes)]
                for row in result["synthetic"]
            ],
        ),
        _block(
            "The same, consecutive checkpoints of a training",
            ["rate", "density", *schemes],
            [
                [
                    f"{row['rate']:g}",
                    f"{row['density']:.2%}",
                    *(f"{row['bytes_per_change'][s]:.3f}" for s in schemes),
                ]
                for row in result["trained"]
            ],
        ),
        _block(
            "GB/s of model: one core, all cores",
            ["density", *_speed_names(result)],
            [
                [
                    f"{row['density']:.1%}",
                    *(f"{row[n]['one']:.1f} {row[n]['all']:.1f}" for n in _speed_names(result)),
                ]
                for row in result["speed"]
            ],
        ),
        _block(
            "Peak memory beside the weights, in chunks of 64 MiB",
            ["density", "level", "encode", "decode", "overwrite"],
            [
                [
                    f"{row['density']:.0%}",
                    row["level"],
                    *(f"{row[f'{name}_chunks']:.2f}" for name in ("encode", "decode", "overwrite")),
                ]
                for row in result["memory"]
            ],
        ),
        _block(
            "Seconds on a link of 10 Gbit/s at 1% changed, on paper",
            ["model", "full", *schemes],
            [_paper(result, model, schemes) for model in ("8B", "32B", "235B", "1T")],
        ),
        _link(result["link"]),
        _ranks(result["ranks"]),
        _checks(result["checks"]),
    ]
    return "\n".join(blocks)


def rank_table(result: Mapping[str, Any]) -> str:
    """The memory of ranks alone."""
    return "\n".join([_ranks(result["ranks"]), _checks(result["checks"])])


def _ranks(rows: Sequence[Mapping[str, Any]]) -> str:
    return _block(
        "Host memory of all ranks over the checkpoint: read, an update decoded, it active",
        ["ranks", "read", "decoded", "active", "decodes"],
        [
            [
                str(row["ranks"]),
                *(f"{row[when]:.3f}" for when in ("read", "decoded", "active")),
                str(row["decodes"]),
            ]
            for row in rows
        ],
    )


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    return _block(
        "Checks",
        ["check", "value", "limit", "verdict"],
        [
            [
                check["check"],
                f"{check['value']:.3f}",
                f"<= {check['at_most']}" if "at_most" in check else f">= {check['at_least']}",
                check["verdict"],
            ]
            for check in checks
        ],
    )


def _link(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"A base across a shaped link: skipped, {found['skipped']}\n"
    shape = found["link"]
    head = ["receivers", "encoded MB", "link MB", "link s", "fetched s", "ready s"]
    return _block(
        f"A base across a link of {shape['mbit']} Mbit/s, {shape['delay_ms']} ms,"
        f" {shape['loss_percent']}% loss",
        head,
        [
            [
                str(row["receivers"]),
                f"{row['encoded_bytes'] / 1e6:.1f}",
                f"{row['link_bytes'] / 1e6:.1f}",
                f"{row['link_s']:.2f}",
                f"{row['fetched_s']:.2f}",
                f"{row['ready_s']:.2f}",
            ]
            for row in found["rows"]
        ],
    )


def _speed_names(result: Mapping[str, Any]) -> list[str]:
    return [name for name, value in result["speed"][0].items() if _is_speed(value)]


def _is_speed(value: object) -> bool:
    return isinstance(value, dict) and "one" in value


def _paper(result: Mapping[str, Any], model: str, schemes: Sequence[str]) -> list[str]:
    rows = {
        r["scheme"]: r for r in result["on_paper"] if (r["model"], r["link_gbit"]) == (model, 10)
    }
    full = rows[schemes[0]]["full_load_s"]
    return [model, f"{full:.1f}", *(f"{rows[scheme]['link_s']:.2f}" for scheme in schemes)]


def _block(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]
    return "\n".join([title, "", *lines, ""])
