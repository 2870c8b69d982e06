"""The connector's half beside vLLM's scheduler: which rows are final, and what a request was. No rows, no disk."""
