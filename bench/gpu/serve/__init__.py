"""Host and guests on one card, under load: engines are started once for the pieces of a call."""
