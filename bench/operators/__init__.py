"""What operators wait for, and what their views of turns cost."""
