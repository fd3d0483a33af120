"""Speed, always as a ratio: against a peer, a bound, or the machine's matmul peak."""
