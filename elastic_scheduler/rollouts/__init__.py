"""Rollouts for a training step: admission, batching, staleness, buffer."""
