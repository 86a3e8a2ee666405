"""The demo's trainer: GRPO over trajectories that replicas rolled out."""
