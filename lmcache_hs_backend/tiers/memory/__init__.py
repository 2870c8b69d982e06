"""Memory of the tiers: what rows are in RAM as."""
