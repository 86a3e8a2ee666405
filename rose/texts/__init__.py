"""Tokenizing in processes of its own: chat templates and long texts, with limits that hold.

    TextPool ── job ──► worker process: renders, encodes, decodes ── answer ──► TextPool
       └─ took too long, or died: killed, begun anew; that job alone is refused

Conversations are callers' data in an operator's program, and a tokenizer's time and memory depend
on its text: neither may hold up, or bring down, the process that serves everybody else.
"""

from rose.texts.pool import TextBusy, TextPool, TextRefused
from rose.texts.worker import Chat, Decode, Done, Encode, Setup, Variable, packed, unpacked

__all__ = [
    "Chat",
    "Decode",
    "Done",
    "Encode",
    "Setup",
    "TextBusy",
    "TextPool",
    "TextRefused",
    "Variable",
    "packed",
    "unpacked",
]
