"""Generation: the `Generator` protocol, sampling parameters, and the engines."""
