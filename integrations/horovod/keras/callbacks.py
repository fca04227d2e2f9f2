"""The callbacks by the name of the module that they have in Horovod."""

from multiring.horovod.tensorflow.keras.callbacks import *  # noqa: F403
