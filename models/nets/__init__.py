"""The ResNet: one specification, its weights, and the net in every framework."""
