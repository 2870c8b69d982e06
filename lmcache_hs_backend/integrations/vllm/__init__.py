"""vLLM's side: a KV connector that keeps the hidden states of served requests in the two tiers."""
