"""The demo's task: a grid world in text, its tokens, data and models."""
