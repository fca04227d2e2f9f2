"""The training job: one ResNet specification, its data, its recipe and the driver behind `multiring
train`."""
