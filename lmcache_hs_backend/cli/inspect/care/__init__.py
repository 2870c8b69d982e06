"""Care: finding what is wrong, setting it aside, and deleting."""
