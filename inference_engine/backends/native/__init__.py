"""The native backend: a model as a list of operations, run by the kernels of `inference_engine/native`."""
