"""Parts of experiments/bench/sweep.py."""
