"""What benchmarks are made of."""
