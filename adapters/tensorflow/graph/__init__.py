"""Operations in functions and graphs of TensorFlow: their names, order, threads and derivatives."""
