"""Addresses of the dashboard's pages; a name from outside is in the query, never in the path."""

from urllib.parse import urlencode


def url(path: str, **query: str | int) -> str:
    """An address; what is empty is left out."""
    asked = {name: value for name, value in query.items() if value not in ("", None)}
    return f"{path}?{urlencode(asked, errors='replace')}" if asked else path
