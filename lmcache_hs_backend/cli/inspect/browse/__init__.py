"""Looking: one chunk, all of them, and what they share."""
