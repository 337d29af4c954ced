"""TensorRT-LLM as an engine."""
