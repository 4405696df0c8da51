"""Slipstream control side: the driver that feeds, scores, trains, publishes and supervises."""
