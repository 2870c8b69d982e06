"""Figures: how much of what there is, and what the rows look like."""
