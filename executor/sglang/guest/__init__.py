"""Guest inside SGLang: the gate before each step of its scheduler, and its KV balloon."""
