"""What Archipelago does on real data: the demo, benchmarks, the experiments of the paper."""
