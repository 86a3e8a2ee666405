"""The same on paper: what an update of a larger model takes on a link, from measured figures."""

from collections.abc import Mapping

MODELS = {"8B": 8e9, "32B": 32e9, "235B": 235e9, "1T": 1e12}
LINKS_GBIT = (10, 25, 50, 100, 200)
BF16_BYTES = 2
BITS = 8


def on_paper(
    density: float, bytes_per_change: Mapping[str, float], encode_gb_s: Mapping[str, float]
) -> list[dict[str, object]]:
    """Seconds on the link, and until the last byte is out when encoding goes on meanwhile.

    `encode_gb_s`: of model, all cores together. Computed, not measured: no delay, no loss.
    """
    rows: list[dict[str, object]] = []
    for model, weights in MODELS.items():
        for link in LINKS_GBIT:
            for scheme, each in bytes_per_change.items():
                size = weights * density * each
                sent_s = size * BITS / (link * 1e9)
                speed = encode_gb_s.get(scheme)
                encoded_s = weights * BF16_BYTES / (speed * 1e9) if speed else None
                rows.append(
                    {
                        "model": model,
                        "link_gbit": link,
                        "scheme": scheme,
                        "bytes": size,
                        "link_s": sent_s,
                        "encode_s": encoded_s,
                        "full_load_s": weights * BF16_BYTES * BITS / (link * 1e9),
                    }
                )
    return rows
