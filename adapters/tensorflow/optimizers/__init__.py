"""Optimizers of Keras and tf_keras whose gradients are reduced over ranks."""
