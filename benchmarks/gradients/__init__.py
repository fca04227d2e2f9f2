"""`multiring bench gradients`: what it costs to keep gradients in step."""
