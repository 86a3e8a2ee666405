"""Guest side of vLLM: scheduler behind the gate, KV balloon, start gate."""
