"""Handing a run to a Ray cluster as a job: checked first, sent, followed to its end."""
