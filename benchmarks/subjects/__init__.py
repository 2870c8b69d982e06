"""The subjects, in the order of their value. Each module has ``TITLE`` and ``run(context) -> Result``."""
