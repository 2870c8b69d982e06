"""Rows of a cold tier as training data: sequences, checks, and the files that trainers read.

Works beside a running engine and without one; needs neither LMCache nor vLLM. Nothing in here changes a
cold path.
"""
