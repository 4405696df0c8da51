"""Slipstream rollout side: sampling with vLLM and the trajectory format it produces."""
