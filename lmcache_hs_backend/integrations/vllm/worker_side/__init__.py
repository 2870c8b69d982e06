"""The connector's half beside the model: from vLLM's cache of hidden states to the tiers, files and records."""
