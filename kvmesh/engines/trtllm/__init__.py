"""The TensorRT-LLM engine. It is written against the published API (`typings/tensorrt_llm`) and has not run with the engine."""
