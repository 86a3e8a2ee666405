"""From vLLM's request ids back to the ids that clients sent."""

import re

# cmpl-<X-Request-Id>-<prompt index>, chatcmpl-<X-Request-Id>; some versions add 8 random digits.
_COMPLETION = re.compile(r"cmpl-(?P<id>.+)-(?P<index>\d{1,4})(?:-[0-9a-f]{8})?")
_CHAT = re.compile(r"chatcmpl-(?P<id>.+)")


def client_request_id(engine_request_id: str) -> str:
    """The X-Request-Id that a client sent, from the id that vLLM made of it.

    Further prompts of one completion request keep their index (`id-1`, `id-2`, …); an id of another
    form is returned as it is.
    """
    if match := _COMPLETION.fullmatch(engine_request_id):
        index = int(match["index"])
        return match["id"] if index == 0 else f"{match['id']}-{index}"
    if match := _CHAT.fullmatch(engine_request_id):
        return match["id"]
    return engine_request_id
