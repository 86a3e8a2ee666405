"""The policy's language: one token for each cell with its content, moves and three marks.

map: 16 cells  |  then, each turn:  where I am  >  planned cells  :  move  .
"""

from typing import Final

SIDE: Final = 4
ROWS = "abcd"
CONTENTS = "SFHG"
MOVES = "LDRU"  # gymnasium's order: left, down, right, up

PAD, BAR, ASK, THEN, STOP = "<pad>", "|", ">", ":", "."
_RESERVED = ("<unused>",)
CELLS = tuple(
    f"{row}{column}{content}"
    for row in ROWS
    for column in range(1, SIDE + 1)
    for content in CONTENTS
)
WORDS = (PAD, BAR, ASK, THEN, STOP, *MOVES, *CELLS, *_RESERVED)
# Engines like round sizes; the rest of the table is never sampled.
VOCABULARY_SIZE = 128
TOKEN_OF = {word: index for index, word in enumerate(WORDS)}

PAD_ID = TOKEN_OF[PAD]
BAR_ID = TOKEN_OF[BAR]
ASK_ID = TOKEN_OF[ASK]
THEN_ID = TOKEN_OF[THEN]
STOP_ID = TOKEN_OF[STOP]
MOVE_IDS = tuple(TOKEN_OF[move] for move in MOVES)
# A reply may contain every token but padding, the bar and the question mark.
REPLY_IDS = tuple(TOKEN_OF[word] for word in (THEN, STOP, *MOVES, *CELLS))


def cell_id(position: int, content: str) -> int:
    """Return the token of the cell `position` (row-major) holding `content`, one of S F H G."""
    row, column = divmod(position, SIDE)
    return TOKEN_OF[f"{ROWS[row]}{column + 1}{content}"]


def words(token_ids: list[int]) -> str:
    """Return tokens as text."""
    return " ".join(WORDS[token] if token < len(WORDS) else f"<{token}>" for token in token_ids)
