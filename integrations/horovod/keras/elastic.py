"""State by the name of the module that it has in Horovod."""

from multiring.horovod.tensorflow.keras.elastic import *  # noqa: F403
