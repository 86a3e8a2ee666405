"""Virtual clock: the queue of events, and an event loop of asyncio on it."""
