"""The tiers of hidden states. Knows nothing of LMCache, vLLM or tokens.

``state``: what is known of every chunk, and every transition of it; pure. ``memory``: bytes in RAM. ``disk``: bytes on
disk, errno, health. ``flows``: who does what when, and under which lock. ``flows`` imports the other three, and these
do not know each other.
"""
