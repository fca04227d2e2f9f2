"""The gradients of a model in each framework, reduced by its adapter: one module for each, found by name."""
