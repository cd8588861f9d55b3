"""The Open Inference Protocol (KServe v2) over the same pipeline: for clients of Triton and KServe."""
