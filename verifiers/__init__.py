"""Slipstream scoring side: verifiers that turn completions into typed verdicts."""
