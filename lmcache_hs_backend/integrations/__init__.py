"""Where the tiers meet the programs that fill and use them. Each one alone imports its program."""
