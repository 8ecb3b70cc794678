"""Benchmarks, and the embedded Kafka clusters that demo, tests and benchmarks run on."""
