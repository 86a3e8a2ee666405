"""Work of the pieces, each in a process of its own that may use torch and the card."""
