"""How fast the tiers are, beside their peers and beside the limits of the machine.

``python -m benchmarks`` runs every subject (one module each in ``subjects``); ``scripts/bench.sh`` does so with
everything set up. Absolute figures drift on shared machines, so every figure is a ratio to something that was
measured in the same rounds of the same run. The package under test is used, never changed.
"""
