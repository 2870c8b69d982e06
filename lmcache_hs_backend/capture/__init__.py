"""From a data set of conversations to hidden states in the tiers.

    rows of files  →  tokens and spans to train on  →  vLLM  →  chunks and request records
     ``sources``        ``encode``, ``spans``          ``engine``, ``server``

``settings`` is what the user chose and what the model's config says; ``estimate`` what a capture will take; ``budget``
keeps it from outgrowing its limit; ``finished`` tells which rows are done; ``flow`` runs all of it. Only ``engine``
imports vLLM, inside functions: a dry run needs transformers and no more.
"""
