"""The command-line tools. They need neither LMCache nor vLLM nor a GPU, and nothing imports them."""
