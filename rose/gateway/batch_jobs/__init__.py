"""Batch jobs of the gateway: OpenAI's `/v1/files` and `/v1/batches`."""
