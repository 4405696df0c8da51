"""A run's history: the ledger, its journal, the trajectory log, and doing steps again."""
