"""Memory that a node's guests hold, and taking it back."""
