"""Names inside a checkpoint that others than the learner look for. Imports nothing."""

COMPLETE = "COMPLETE"
"""The file that makes a folder a finished checkpoint."""
