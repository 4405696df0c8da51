"""The control service (gRPC, `slipstream.v1`) of a live run, and the commands that use it."""
