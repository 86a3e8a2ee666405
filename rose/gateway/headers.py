"""What every generating route reads from headers; a field of the body wins over most."""

from collections.abc import Mapping

from rose.gateway.errors import BadRequest

TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"
EVENT_ID_HEADER = "Last-Event-ID"
MAX_DIGITS = 15


def header_of(headers: Mapping[str, str], name: str) -> str | None:
    """A header's text; None where it is not sent. Raises BadRequest for bytes that are no text."""
    text = headers.get(name)
    # The server keeps undecodable bytes as surrogates, which no answer and no log can hold.
    if text is not None and not (text.isascii() or _is_text(text)):
        raise BadRequest(f"{name} is not UTF-8", name)
    return text


def timeout_of(headers: Mapping[str, str], body_s: float | None) -> float | None:
    """Seconds that the caller allows: the body's field, else the header. Raises BadRequest."""
    text = header_of(headers, TIMEOUT_HEADER)
    if body_s is not None or text is None:
        return body_s
    try:
        return float(text)
    except ValueError as error:
        raise BadRequest(f"{TIMEOUT_HEADER} is a number of seconds, not {text[:40]!r}") from error


def resume_of(headers: Mapping[str, str], body_from: int | None) -> tuple[int, bool]:
    """Tokens that the caller has already, and whether it wants event ids. Raises BadRequest."""
    text = header_of(headers, EVENT_ID_HEADER)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise BadRequest(f"{EVENT_ID_HEADER} is a number of tokens, not {text[:40]!r}")
    start = body_from if body_from is not None else int(text or 0)
    if not 0 <= start < 10**MAX_DIGITS:
        raise BadRequest(
            f"resume_from is a number of tokens: at least 0, at most {MAX_DIGITS} digits",
            "resume_from",
        )
    return start, text is not None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
