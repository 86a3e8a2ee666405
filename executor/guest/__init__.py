"""Guest of any engine: the gate before each step, the KV balloon, the watchdog, the gated start."""
