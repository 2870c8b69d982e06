"""The two tiers and what moves chunks between them. Knows nothing of LMCache, vLLM or tokens."""
