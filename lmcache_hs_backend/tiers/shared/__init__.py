"""The shared tier: a bucket's health, and chunks as objects. Knows no chunk's state and decides nothing about one.

Nothing here is imported, and no thread runs, while ``shared_url`` is off.
"""
