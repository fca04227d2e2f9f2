"""The commands of `multiring`, beside those of models and benchmarks; `multiring.cli` finds them."""
