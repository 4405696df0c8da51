"""Slipstream training side: advantages, objective, FSDP learner and weight publication."""
